// SPDX-License-Identifier: Apache-2.0
#include <sherd/runtime/error.h>
#include <sherd/runtime/io/quote.h>
#include <sherd/runtime/io/torch_listing.h>
#include <sherd/runtime/io/torch_types.h>

#include <array>
#include <utility>

namespace sherd {
namespace {

constexpr int kDeepest = 64;
constexpr std::size_t kMaxRank = 64;  // PyTorch's own limit
constexpr std::string_view kUtils = "torch._utils._rebuild_";

bool wraps_a_tensor(std::string_view callee) {
  return callee == "torch._utils._rebuild_parameter" ||
         callee == "torch._utils._rebuild_parameter_with_state";
}

// The arguments of all begin with storage, offset, shape and strides.
bool rebuilds_a_tensor(std::string_view callee) {
  return callee == "torch._utils._rebuild_tensor" || callee == "torch._utils._rebuild_tensor_v2" ||
         callee == "torch._utils._rebuild_tensor_v3" || callee == "torch._utils._rebuild_qtensor";
}

constexpr std::string_view kFromType = "torch._tensor._rebuild_from_type_v2";

}  // namespace

template <typename... Args>
void TorchListing::check(bool condition, fmt::format_string<Args...> format, Args&&... args) const {
  if (condition) return;
  fail("'{}': tensor {} {}", path_, quote(name_), fmt::format(format, std::forward<Args>(args)...));
}

bool TorchListing::is_tensor(PickleId id) const {
  const auto* call = tree_.get<PickleCall>(id);
  if (call == nullptr) return false;
  const std::string callee = tree_.global_name(call->callee);
  return wraps_a_tensor(callee) || rebuilds_a_tensor(callee) || callee == kFromType;
}

// Names and visits beyond a multiple of the pickle's own size come of values that share.
void TorchListing::spend(std::size_t cost) {
  spent_ += cost;
  SHERD_CHECK(spent_ <= budget_,
              "'{}': its containers share so much that its tensors cannot be listed in a "
              "reasonable time; at {}",
              path_, quote(name_));
}

std::vector<TorchTensor> TorchListing::tensors() {
  constexpr std::size_t kSmall = std::size_t{1} << 20, kTimes = 16;
  budget_ = kSmall + kTimes * tree_.used;
  walk(tree_.root, 0);
  return std::move(tensors_);
}

void TorchListing::walk(PickleId id, int depth) {
  SHERD_CHECK(depth <= kDeepest,
              "'{}': its containers lie more than {} deep or contain themselves, at {}", path_,
              kDeepest, quote(name_));
  spend(1);
  if (is_tensor(id)) {
    if (depth == 0) name_ = "tensor";
    return add_tensor(id);
  }
  if (const auto* dict = tree_.get<PickleDict>(id)) return walk_dict(*dict, depth);
  if (const auto* call = tree_.get<PickleCall>(id)) {
    // An argparse.Namespace has its attributes as a dict.
    const auto* attributes = tree_.get<PickleDict>(call->state);
    if (attributes != nullptr) walk_dict(*attributes, depth);
    return;
  }
  const auto* list = tree_.get<PickleList>(id);
  const auto* tuple = tree_.get<PickleTuple>(id);
  if (list == nullptr && tuple == nullptr) return;
  const std::vector<PickleId>& items = list != nullptr ? list->items : tuple->items;
  for (std::size_t i = 0; i < items.size(); ++i) {
    walk_child(items[i], fmt::format("{}", i), depth);
  }
}

void TorchListing::walk_dict(const PickleDict& dict, int depth) {
  for (std::size_t i = 0; i < dict.items.size(); ++i) {
    const auto& [key, value] = dict.items[i];
    if (const auto* text = tree_.get<std::string_view>(key)) {
      walk_child(value, std::string(*text), depth);
    } else if (const auto* index = tree_.get<std::int64_t>(key)) {
      walk_child(value, fmt::format("{}", *index), depth);
    } else {
      walk_child(value, fmt::format("#{}", i), depth);  // by its place
    }
  }
}

void TorchListing::walk_child(PickleId child, const std::string& key, int depth) {
  spend(1 + key.size());
  const PickleValue& value = tree_[child];
  const bool inside =
      std::holds_alternative<PickleDict>(value) || std::holds_alternative<PickleList>(value) ||
      std::holds_alternative<PickleTuple>(value) || std::holds_alternative<PickleCall>(value);
  if (!inside) return;
  const std::size_t before = name_.size();
  if (depth > 0) name_ += '.';
  name_ += key;
  walk(child, depth + 1);
  name_.resize(before);
}

void TorchListing::add_tensor(PickleId id) {
  const PickleCall* call = tree_.get<PickleCall>(id);
  std::string callee = tree_.global_name(call->callee);
  const std::vector<PickleId>* arguments = &tree_.get<PickleTuple>(call->arguments)->items;
  if (wraps_a_tensor(callee)) {
    check(!arguments->empty(), "is a parameter of nothing");
    call = tree_.get<PickleCall>((*arguments)[0]);
    check(call != nullptr, "is a parameter of {}, expected a tensor",
          kind_of(tree_[(*arguments)[0]]));
    callee = tree_.global_name(call->callee);
    arguments = &tree_.get<PickleTuple>(call->arguments)->items;
  }
  if (callee == kFromType) {  // function, type, arguments, attributes
    const bool enough = arguments->size() >= 3;
    const std::string type = enough ? tree_.global_name((*arguments)[1]) : "";
    check(type == "torch.Tensor" || type == "torch.nn.parameter.Parameter",
          "is of type {}, expected torch.Tensor", quote(type));
    const auto* inner = tree_.get<PickleTuple>((*arguments)[2]);
    check(inner != nullptr, "is made of {}, expected a tuple", kind_of(tree_[(*arguments)[2]]));
    callee = tree_.global_name((*arguments)[0]);
    arguments = &inner->items;
  }
  check(rebuilds_a_tensor(callee), "is made by {}, expected {}tensor_v2", quote(callee), kUtils);
  constexpr std::size_t kDType = 6;
  const bool v3 = callee.ends_with("_v3");
  check(arguments->size() > (v3 ? kDType : 3), "is made from {} arguments, too few",
        arguments->size());
  TorchTensor tensor;
  tensor.name = name_;
  read_storage((*arguments)[0], v3 ? tree_.global_name((*arguments)[kDType]) : "", tensor);
  const std::int64_t offset = number((*arguments)[1], "offset");
  check(offset >= 0, "has the offset {}, expected 0 or more", offset);
  tensor.offset = static_cast<std::uint64_t>(offset);
  tensor.shape = numbers((*arguments)[2], "shape");
  tensor.strides = numbers((*arguments)[3], "strides");
  check_extent(tensor);
  spend(tensor.name.size() + tensor.shape.size());
  tensors_.push_back(std::move(tensor));
}

std::int64_t TorchListing::number(PickleId id, const char* what) const {
  const auto* value = tree_.get<std::int64_t>(id);
  check(value != nullptr, "has {} as its {}, expected a whole number", kind_of(tree_[id]), what);
  return *value;
}

std::vector<std::int64_t> TorchListing::numbers(PickleId id, const char* what) const {
  const auto* tuple = tree_.get<PickleTuple>(id);
  check(tuple != nullptr, "has {} as its {}, expected a tuple", kind_of(tree_[id]), what);
  check(tuple->items.size() <= kMaxRank, "has {} dimensions, at most {} are possible",
        tuple->items.size(), kMaxRank);
  std::vector<std::int64_t> found;
  for (const PickleId item : tuple->items) {
    found.push_back(number(item, what));
    check(found.back() >= 0, "has {} among its {}, expected no negative number", found.back(),
          what);
  }
  return found;
}

// `dtype`: where the tensor says its type itself, beside an untyped storage.
void TorchListing::read_storage(PickleId id, std::string_view dtype, TorchTensor& tensor) const {
  const auto* outside = tree_.get<PicklePersistent>(id);
  const auto* parts = outside == nullptr ? nullptr : tree_.get<PickleTuple>(outside->id);
  // "storage", type, key, device, number of elements; before version 1.6 also what it is a view of,
  // which none has that was written by 0.4 or later
  constexpr std::size_t kParts = 5;
  check(parts != nullptr &&
            (parts->items.size() == kParts ||
             (parts->items.size() == kParts + 1 && tree_.get<PickleNone>(parts->items[kParts]))),
        "has {} for a storage, expected a reference with 5 parts", kind_of(tree_[id]));
  const auto* mark = tree_.get<std::string_view>(parts->items[0]);
  check(mark != nullptr && *mark == "storage", "has a reference to something else than a storage");
  const std::string storage_type = tree_.global_name(parts->items[1]);
  const TorchType* type =
      dtype.empty() ? torch_type_of_storage(storage_type) : torch_type_of_dtype(dtype);
  check(type != nullptr && (dtype.empty() || storage_type == kUntypedStorage),
        "has a storage of type {} and elements of type {}, which do not go together",
        quote(storage_type), quote(dtype));
  const auto* key = tree_.get<std::string_view>(parts->items[2]);
  constexpr std::size_t kLongestKey = 256;
  check(key != nullptr && key->size() <= kLongestKey, "has no usable key of a storage");
  const std::int64_t count = number(parts->items[4], "storage's size");

  const FoundStorage found = find_storage_(*key);
  check(found.has_value(), "lies in the storage {}, which the file lacks", quote(*key));
  const std::span<const std::uint8_t> stored = *found;
  const std::uint64_t unit = dtype.empty() ? type->bytes : 1;
  check(count >= 0 && static_cast<std::uint64_t>(count) <= stored.size() / unit,
        "lies in the storage {} of {} elements of {} bytes, for which the file has {} bytes",
        quote(*key), count, unit, stored.size());
  tensor.storage = stored.first(static_cast<std::size_t>(count) * unit);
  tensor.type = type->name;
  tensor.dtype = type->dtype;
  tensor.width = type->bytes;
}

void TorchListing::check_extent(TorchTensor& tensor) const {
  const std::vector<std::int64_t>& shape = tensor.shape;
  check(shape.size() == tensor.strides.size(), "has {} dimensions and {} strides", shape.size(),
        tensor.strides.size());
  std::int64_t count = 1, bytes = static_cast<std::int64_t>(tensor.width);
  auto last = static_cast<std::int64_t>(tensor.offset);
  bool empty = false, overflow = false;
  for (std::size_t i = 0; i < shape.size(); ++i) {
    empty = empty || shape[i] == 0;
    overflow = __builtin_mul_overflow(count, shape[i], &count) || overflow;
    overflow = __builtin_mul_overflow(bytes, shape[i], &bytes) || overflow;
    std::int64_t reach = 0;
    overflow = __builtin_mul_overflow(shape[i] - 1, tensor.strides[i], &reach) || overflow;
    overflow = __builtin_add_overflow(last, reach, &last) || overflow;
  }
  if (empty) return;  // numel 0; no element, so nowhere
  check(!overflow, "with shape [{}] and strides [{}] overflows 64 bits", fmt::join(shape, ", "),
        fmt::join(tensor.strides, ", "));
  const std::uint64_t room = tensor.storage.size() / tensor.width;
  check(static_cast<std::uint64_t>(last) < room,
        "with shape [{}], strides [{}] and offset {} reaches element {} of a storage of {}",
        fmt::join(shape, ", "), fmt::join(tensor.strides, ", "), tensor.offset, last, room);
  tensor.numel = static_cast<std::uint64_t>(count);
}

std::string TorchListing::state_dict() const {
  constexpr std::array<std::string_view, 5> kKeys{"model", "state_dict", "model_state_dict",
                                                  "module", "ema"};
  const auto* root = tree_.get<PickleDict>(tree_.root);
  if (root == nullptr) return "";
  const auto count = [&](const PickleDict& dict) {
    std::size_t tensors = 0;
    for (const auto& item : dict.items) tensors += is_tensor(item.second) ? 1 : 0;
    return tensors;
  };
  std::string best;
  std::size_t most = count(*root);
  for (const std::string_view key : kKeys) {
    const PickleId* id = tree_.find(*root, key);
    const auto* dict = id == nullptr ? nullptr : tree_.get<PickleDict>(*id);
    if (dict == nullptr || count(*dict) <= most) continue;
    most = count(*dict);
    best = std::string(key) + ".";
  }
  return best;
}

}  // namespace sherd
