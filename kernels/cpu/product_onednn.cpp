// SPDX-License-Identifier: Apache-2.0
#include <sherd/kernels/cpu/elementwise.h>
#include <sherd/kernels/cpu/parallel.h>
#include <sherd/kernels/cpu/product.h>
#include <sherd/runtime/error.h>

#include <algorithm>
#include <deque>
#include <dnnl.hpp>
#include <exception>
#include <list>
#include <optional>
#include <unordered_map>
#include <vector>

namespace sherd::cpu {
namespace {

using dnnl::memory;

// A product for a number of threads.
struct Key {
  Product product;
  int threads = 1;
  bool operator==(const Key&) const = default;
};

struct KeyHash {
  std::size_t operator()(const Key& key) const {
    const Product& p = key.product;
    std::size_t hash = static_cast<std::size_t>(key.threads);
    for (const std::int64_t part :
         {p.m, p.n, p.k,
          (p.transpose_a ? 1 : 0) + (p.transpose_b ? 2 : 0) + (p.bias ? 4 : 0) +
              16 * static_cast<std::int64_t>(p.activation) +
              256 * static_cast<std::int64_t>(p.dtype) +
              4096 * static_cast<std::int64_t>(p.out_dtype)}) {
      hash = hash * 0x9E3779B97F4A7C15u + static_cast<std::size_t>(part) + (hash >> 29);
    }
    return hash;
  }
};

// A product compiled for its shapes.
struct Compiled {
  dnnl::matmul::primitive_desc description;
  std::size_t workspace_bytes = 0;
  // Made on the first run: meta never runs.
  dnnl::matmul primitive;
  std::deque<std::unordered_map<int, memory>> slots;
};

struct Operands {
  const void *a, *b, *bias;
  void *out, *workspace;
};

memory::data_type onednn_type(DType dtype) {
  return dtype == DType::f32 ? memory::data_type::f32 : memory::data_type::bf16;
}

// Compiled products of one context, the least recently used dropped beyond kCapacity: shapes of a
// training run are few, but an embedding program may see new ones for ever.
class ProductCache {
 public:
  static constexpr std::size_t kCapacity = 256;

  // The reference holds until kCapacity other products have been asked for.
  Compiled& find_or_compile(const Product& product, int threads) {
    const Key key{product, threads};
    const auto found = index_.find(key);
    if (found != index_.end()) {
      entries_.splice(entries_.begin(), entries_, found->second);
      return found->second->second;
    }
    const ThreadCountScope scope(threads);
    entries_.emplace_front(key, compile(product));
    index_[key] = entries_.begin();
    if (entries_.size() > kCapacity) {
      index_.erase(entries_.back().first);
      entries_.pop_back();
    }
    return entries_.front().second;
  }

  std::size_t size() const { return entries_.size(); }

  bool multiplies_bf16() {
    if (!bf16_) {
      try {
        for (const DType out : {DType::bf16, DType::f32}) {
          compile({16, 16, 16, false, false, false, Activation::none, DType::bf16, out});
        }
        bf16_ = true;
      } catch (const Error&) {
        bf16_ = false;
      }
    }
    return *bf16_;
  }

  // Makes the primitive and `slots` sets of arguments, whose pointers each run sets.
  void prepare(Compiled& compiled, std::size_t slots) const {
    const auto& d = compiled.description;
    if (!compiled.primitive) compiled.primitive = dnnl::matmul(d);
    while (compiled.slots.size() < slots) {
      auto& arguments = compiled.slots.emplace_back();
      for (const auto& [argument, description] : {std::pair{DNNL_ARG_SRC, d.src_desc()},
                                                  {DNNL_ARG_WEIGHTS, d.weights_desc()},
                                                  {DNNL_ARG_BIAS, d.bias_desc()},
                                                  {DNNL_ARG_DST, d.dst_desc()},
                                                  {DNNL_ARG_SCRATCHPAD, d.scratchpad_desc()}}) {
        if (description.get_size() == 0) continue;
        arguments.emplace(argument, memory(description, engine_, nullptr));
      }
    }
  }

  // Several threads may run one product at once, each with a slot of its own.
  void run(Compiled& compiled, std::size_t slot, const Operands& operands) const {
    auto& arguments = compiled.slots[slot];
    const auto set = [&](int argument, const void* data) {
      const auto found = arguments.find(argument);
      if (found != arguments.end()) found->second.set_data_handle(const_cast<void*>(data));
    };
    set(DNNL_ARG_SRC, operands.a);
    set(DNNL_ARG_WEIGHTS, operands.b);
    set(DNNL_ARG_BIAS, operands.bias);
    set(DNNL_ARG_DST, operands.out);
    set(DNNL_ARG_SCRATCHPAD, operands.workspace);
    dnnl::stream stream(engine_);
    compiled.primitive.execute(stream, arguments);
    stream.wait();
  }

 private:
  Compiled compile(const Product& p) const {
    try {
      return describe(p);
    } catch (const dnnl::error& error) {
      fail("oneDNN: no product of {} [{} x {}] by [{} x {}]: {}", name_of(p.dtype), p.m, p.k, p.k,
           p.n, error.what());
    }
  }

  Compiled describe(const Product& p) const {
    const auto type = onednn_type(p.dtype);
    const auto tag = [](bool transposed) {
      return transposed ? memory::format_tag::ba : memory::format_tag::ab;
    };
    const memory::desc a({p.m, p.k}, type, tag(p.transpose_a));
    const memory::desc b({p.k, p.n}, type, tag(p.transpose_b));
    const memory::desc out({p.m, p.n}, onednn_type(p.out_dtype), memory::format_tag::ab);
    dnnl::primitive_attr attributes;
    attributes.set_scratchpad_mode(dnnl::scratchpad_mode::user);
    if (p.activation != Activation::none) {
      dnnl::post_ops after;
      const auto algorithm = p.activation == Activation::relu ? dnnl::algorithm::eltwise_relu
                             : p.activation == Activation::gelu_erf
                                 ? dnnl::algorithm::eltwise_gelu_erf
                                 : dnnl::algorithm::eltwise_gelu_tanh;
      after.append_eltwise(1.0f, algorithm, 0.0f, 0.0f);
      attributes.set_post_ops(after);
    }
    Compiled compiled;
    if (p.bias) {
      const memory::desc bias({1, p.n}, type, memory::format_tag::ab);
      compiled.description = {dnnl::matmul::desc(a, b, bias, out), attributes, engine_};
    } else {
      compiled.description = {dnnl::matmul::desc(a, b, out), attributes, engine_};
    }
    compiled.workspace_bytes = compiled.description.scratchpad_desc().get_size();
    return compiled;
  }

  std::optional<bool> bf16_;
  dnnl::engine engine_{dnnl::engine::kind::cpu, 0};
  std::list<std::pair<Key, Compiled>> entries_;
  std::unordered_map<Key, std::list<std::pair<Key, Compiled>>::iterator, KeyHash> index_;
};

// oneDNN has no fp64, and its generated code addresses a few dozen rows by 32-bit displacements.
bool runs_in_onednn(const Product& p) {
  constexpr std::int64_t kLongestRow = 1 << 22;
  return p.dtype != DType::f64 && std::max({p.m, p.n, p.k}) <= kLongestRow;
}

// Note [Long sums]
// The gradient of a weight has few elements, each a sum over all rows of a batch. oneDNN shares
// such a product out by its elements, in blocks so large that threads go idle (three blocks for two
// threads). So each thread multiplies its own part of the rows, alone, and the parts are added in
// order: measured 1.4 times as fast for 192 x 64 x 2176 on two threads.
struct Parts {
  int count = 1;
  std::int64_t rows = 0;  // of a part; the last one may have fewer
};

Parts parts_of(const Context& context, const Product& p) {
  constexpr std::int64_t kFewElements = 1 << 16, kLongSum = 256;
  const int threads = context.threads();
  const bool long_sum = p.transpose_a && !p.transpose_b && !p.bias &&
                        p.activation == Activation::none && p.out_dtype == DType::f32 &&
                        p.m * p.n <= kFewElements && p.k >= kLongSum * threads;
  if (threads == 1 || !long_sum) return {};
  return {threads, (p.k + threads - 1) / threads};
}

Product part_of(const Product& product, const Parts& parts, int index) {
  Product part = product;
  part.k = std::min(parts.rows, product.k - index * parts.rows);
  return part;
}

constexpr std::size_t kLine = 64;
std::size_t whole_lines(std::size_t bytes) {
  return (bytes + kLine - 1) / kLine * kLine;
}

// Scratch of the parts: the sums of all but the first, then oneDNN's own for each.
std::size_t sum_bytes(const Product& p) {
  return whole_lines(static_cast<std::size_t>(p.m * p.n) * sizeof(float));
}

void run_in_parts(Context& context, const Product& product, const Parts& parts,
                  const Operands& operands) {
  auto& cache = context.attachment<ProductCache>();
  auto* scratch = static_cast<std::byte*>(operands.workspace);
  auto* sums = scratch;
  scratch += static_cast<std::size_t>(parts.count - 1) * sum_bytes(product);
  std::vector<std::pair<Compiled*, Operands>> work;
  for (int i = 0; i < parts.count; ++i) {
    Compiled& compiled = cache.find_or_compile(part_of(product, parts, i), 1);
    cache.prepare(compiled, static_cast<std::size_t>(parts.count));
    const auto first_row = static_cast<std::size_t>(i * parts.rows);
    const auto row_of = [&](const void* matrix, std::int64_t cols) {
      return static_cast<const std::byte*>(matrix) +
             first_row * static_cast<std::size_t>(cols) * size_of(product.dtype);
    };
    work.push_back(
        {&compiled,
         {row_of(operands.a, product.m), row_of(operands.b, product.n), nullptr,
          i == 0 ? operands.out : sums + static_cast<std::size_t>(i - 1) * sum_bytes(product),
          scratch}});
    scratch += whole_lines(compiled.workspace_bytes);
  }
  std::vector<std::exception_ptr> errors(work.size());
  parallel_tasks(parts.count, parts.count, [&](std::int64_t i) {
    const auto index = static_cast<std::size_t>(i);
    try {
      const ThreadCountScope alone(1);
      cache.run(*work[index].first, index, work[index].second);
    } catch (...) {
      errors[index] = std::current_exception();
    }
  });
  for (const std::exception_ptr& error : errors) {
    if (error) std::rethrow_exception(error);
  }
  for (int i = 1; i < parts.count; ++i) {
    add_inplace(context.threads(), product.m * product.n,
                static_cast<const float*>(work[static_cast<std::size_t>(i)].second.out),
                static_cast<float*>(operands.out));
  }
}

}  // namespace

bool product_supports(Context& context, DType dtype) {
  if (dtype == DType::bf16) return context.attachment<ProductCache>().multiplies_bf16();
  return dtype == DType::f32 || dtype == DType::f64;
}

std::size_t product_workspace_bytes(Context& context, const Product& product) {
  if (!runs_in_onednn(product)) return 0;
  auto& cache = context.attachment<ProductCache>();
  const Parts parts = parts_of(context, product);
  if (parts.count == 1) return cache.find_or_compile(product, context.threads()).workspace_bytes;
  std::size_t bytes = static_cast<std::size_t>(parts.count - 1) * sum_bytes(product);
  for (int i = 0; i < parts.count; ++i) {
    bytes += whole_lines(cache.find_or_compile(part_of(product, parts, i), 1).workspace_bytes);
  }
  return bytes;
}

std::size_t cached_products(Context& context) {
  return context.attachment<ProductCache>().size();
}

void run_product(Context& context, const Product& product, const void* a, const void* b,
                 const void* bias, void* out, void* workspace) {
  const ThreadCountScope threads(context.threads());
  if (!runs_in_onednn(product)) {
    run_product_eigen(context, product, a, b, bias, out);
    return;
  }
  try {
    const Parts parts = parts_of(context, product);
    if (parts.count > 1) {
      run_in_parts(context, product, parts, {a, b, bias, out, workspace});
      return;
    }
    auto& cache = context.attachment<ProductCache>();
    Compiled& compiled = cache.find_or_compile(product, context.threads());
    cache.prepare(compiled, 1);
    cache.run(compiled, 0, {a, b, bias, out, workspace});
  } catch (const dnnl::error& error) {
    fail("oneDNN: product of {} [{} x {}] by [{} x {}]: {}", name_of(product.dtype), product.m,
         product.k, product.k, product.n, error.what());
  }
}

}  // namespace sherd::cpu
