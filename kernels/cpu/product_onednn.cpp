// SPDX-License-Identifier: Apache-2.0
#include <sherd/kernels/cpu/product.h>
#include <sherd/runtime/error.h>

#include <algorithm>
#include <dnnl.hpp>
#include <list>
#include <optional>
#include <unordered_map>

namespace sherd::cpu {
namespace {

using dnnl::memory;

struct ProductHash {
  std::size_t operator()(const Product& p) const {
    std::size_t hash = 0;
    for (const std::int64_t part :
         {p.m, p.n, p.k,
          (p.transpose_a ? 1 : 0) + (p.transpose_b ? 2 : 0) + (p.bias ? 4 : 0) +
              16 * static_cast<std::int64_t>(p.activation) +
              256 * static_cast<std::int64_t>(p.dtype)}) {
      hash = hash * 0x9E3779B97F4A7C15u + static_cast<std::size_t>(part) + (hash >> 29);
    }
    return hash;
  }
};

// A product compiled for its shapes, with handles whose pointers are set for each run.
struct Compiled {
  dnnl::matmul::primitive_desc description;
  std::size_t workspace_bytes = 0;
  dnnl::matmul primitive;  // made on the first run: meta never runs
  std::unordered_map<int, memory> arguments;
};

memory::data_type onednn_type(DType dtype) {
  return dtype == DType::f32 ? memory::data_type::f32 : memory::data_type::bf16;
}

// Compiled products of one context, the least recently used dropped beyond kCapacity: shapes of a
// training run are few, but an embedding program may see new ones for ever.
class ProductCache {
 public:
  static constexpr std::size_t kCapacity = 256;

  Compiled& find_or_compile(const Product& product) {
    const auto found = index_.find(product);
    if (found != index_.end()) {
      entries_.splice(entries_.begin(), entries_, found->second);
      return found->second->second;
    }
    entries_.emplace_front(product, compile(product));
    index_[product] = entries_.begin();
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
        compile({16, 16, 16, false, false, false, Activation::none, DType::bf16});
        bf16_ = true;
      } catch (const Error&) {
        bf16_ = false;
      }
    }
    return *bf16_;
  }

  void run(Compiled& compiled, const void* a, const void* b, const void* bias, void* out,
           void* workspace) {
    if (!compiled.primitive) prepare(compiled);
    const auto set = [&](int argument, const void* data) {
      const auto found = compiled.arguments.find(argument);
      if (found != compiled.arguments.end()) found->second.set_data_handle(const_cast<void*>(data));
    };
    set(DNNL_ARG_SRC, a);
    set(DNNL_ARG_WEIGHTS, b);
    set(DNNL_ARG_BIAS, bias);
    set(DNNL_ARG_DST, out);
    set(DNNL_ARG_SCRATCHPAD, workspace);
    compiled.primitive.execute(stream_, compiled.arguments);
    stream_.wait();
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
    const memory::desc out({p.m, p.n}, type, memory::format_tag::ab);
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

  void prepare(Compiled& compiled) const {
    const auto& d = compiled.description;
    compiled.primitive = dnnl::matmul(d);
    const auto add = [&](int argument, const memory::desc& description) {
      if (description.get_size() > 0) {
        compiled.arguments.emplace(argument, memory(description, engine_, nullptr));
      }
    };
    add(DNNL_ARG_SRC, d.src_desc());
    add(DNNL_ARG_WEIGHTS, d.weights_desc());
    add(DNNL_ARG_BIAS, d.bias_desc());
    add(DNNL_ARG_DST, d.dst_desc());
    add(DNNL_ARG_SCRATCHPAD, d.scratchpad_desc());
  }

  std::optional<bool> bf16_;
  dnnl::engine engine_{dnnl::engine::kind::cpu, 0};
  dnnl::stream stream_{engine_};
  std::list<std::pair<Product, Compiled>> entries_;
  std::unordered_map<Product, std::list<std::pair<Product, Compiled>>::iterator, ProductHash>
      index_;
};

// oneDNN has no fp64, and its generated code addresses a few dozen rows by 32-bit displacements.
bool runs_in_onednn(const Product& p) {
  constexpr std::int64_t kLongestRow = 1 << 22;
  return p.dtype != DType::f64 && std::max({p.m, p.n, p.k}) <= kLongestRow;
}

}  // namespace

bool product_supports(Context& context, DType dtype) {
  if (dtype == DType::bf16) return context.attachment<ProductCache>().multiplies_bf16();
  return dtype == DType::f32 || dtype == DType::f64;
}

std::size_t product_workspace_bytes(Context& context, const Product& product) {
  if (!runs_in_onednn(product)) return 0;
  const ThreadCountScope threads(context.threads());
  return context.attachment<ProductCache>().find_or_compile(product).workspace_bytes;
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
    auto& cache = context.attachment<ProductCache>();
    cache.run(cache.find_or_compile(product), a, b, bias, out, workspace);
  } catch (const dnnl::error& error) {
    fail("oneDNN: product of {} [{} x {}] by [{} x {}]: {}", name_of(product.dtype), product.m,
         product.k, product.k, product.n, error.what());
  }
}

}  // namespace sherd::cpu
