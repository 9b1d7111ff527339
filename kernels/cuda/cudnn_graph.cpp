// SPDX-License-Identifier: Apache-2.0
#include <sherd/kernels/cuda/cudnn_graph.h>

#include <algorithm>
#include <utility>

namespace sherd::cuda::cudnn {
namespace {

cudnnDataType_t type_of(DType dtype) {
  switch (dtype) {
    case DType::f32: return CUDNN_DATA_FLOAT;
    case DType::f16: return CUDNN_DATA_HALF;
    case DType::bf16: return CUDNN_DATA_BFLOAT16;
    default: fail("cuDNN: a tensor of {}", name_of(dtype));
  }
}

Extents gapless(const Extents& sizes) {
  return {sizes[1] * sizes[2] * sizes[3], sizes[2] * sizes[3], sizes[3], 1};
}

// The reasons that cuDNN gives for what went wrong last, as the end of a line.
std::string last_reasons() {
  char details[400] = "";
  cudnnGetLastErrorString(details, sizeof details);
  std::string text(details);
  std::ranges::replace(text, '\n', ' ');
  return text.empty() ? text : ": " + text;
}

std::string message_of(cudnnStatus_t status, const std::string& call) {
  return fmt::format("cuDNN {}: {} ({}) in {}{}", version(), cudnnGetErrorString(status),
                     static_cast<int>(status), call, last_reasons());
}

// What a mode of the heuristics proposes, the best first.
std::vector<Descriptor> proposals(const Descriptor& graph, cudnnBackendHeurMode_t mode,
                                  std::string* why) {
  Descriptor heuristics(CUDNN_BACKEND_ENGINEHEUR_DESCRIPTOR, "engine heuristics");
  heuristics.set(SHERD_CUDNN_ATTRIBUTE(ENGINEHEUR_OPERATION_GRAPH), graph);
  heuristics.set(SHERD_CUDNN_ATTRIBUTE(ENGINEHEUR_MODE), CUDNN_TYPE_HEUR_MODE, mode);
  const cudnnStatus_t status = heuristics.try_finalize();
  if (status != CUDNN_STATUS_SUCCESS) {
    *why = message_of(status, "engine heuristics");
    return {};
  }
  const Attribute results = SHERD_CUDNN_ATTRIBUTE(ENGINEHEUR_RESULTS);
  const std::size_t count = heuristics.read(results, CUDNN_TYPE_BACKEND_DESCRIPTOR, 0, nullptr);
  std::vector<Descriptor> found;
  std::vector<cudnnBackendDescriptor_t> handles;
  for (std::size_t i = 0; i < count; ++i) {
    found.emplace_back(CUDNN_BACKEND_ENGINECFG_DESCRIPTOR, "engine configuration");
    handles.push_back(found.back().get());
  }
  if (count > 0) {
    const std::size_t written =
        heuristics.read(results, CUDNN_TYPE_BACKEND_DESCRIPTOR, count, handles.data());
    while (found.size() > written) found.pop_back();
    if (written == 0) *why = fmt::format("it supports none of {} engines{}", count, last_reasons());
  }
  return found;
}

}  // namespace

std::string version() {
  const std::size_t number = cudnnGetVersion();
  return fmt::format("{}.{}.{}", number / 10000, number / 100 % 100, number % 100);
}

void fail_call(cudnnStatus_t status, const std::string& call) {
  fail("{}", message_of(status, call));
}

Handle::~Handle() {
  if (handle_ != nullptr) cudnnDestroy(handle_);
}

cudnnHandle_t Handle::get(void* stream) {
  if (handle_ != nullptr) return handle_;
  cudnnStatus_t status = cudnnCreate(&handle_);
  if (status != CUDNN_STATUS_SUCCESS) {
    handle_ = nullptr;
    fail_call(status, "cudnnCreate");
  }
  status = cudnnSetStream(handle_, static_cast<cudaStream_t>(stream));
  if (status != CUDNN_STATUS_SUCCESS) fail_call(status, "cudnnSetStream");
  return handle_;
}

Descriptor::Descriptor(cudnnBackendDescriptorType_t type, std::string text)
    : text_(std::move(text)) {
  const cudnnStatus_t status = cudnnBackendCreateDescriptor(type, &descriptor_);
  if (status != CUDNN_STATUS_SUCCESS) fail_call(status, text_ + ", create");
}

Descriptor::~Descriptor() {
  if (descriptor_ != nullptr) cudnnBackendDestroyDescriptor(descriptor_);
}

Descriptor::Descriptor(Descriptor&& other) noexcept
    : descriptor_(std::exchange(other.descriptor_, nullptr)), text_(std::move(other.text_)) {}

void Descriptor::set(Attribute attribute, cudnnBackendAttributeType_t type, std::size_t count,
                     const void* values) {
  const cudnnStatus_t status = cudnnBackendSetAttribute(descriptor_, attribute.name, type,
                                                        static_cast<std::int64_t>(count), values);
  if (status != CUDNN_STATUS_SUCCESS) fail_call(status, text_ + ", set " + attribute.text);
}

void Descriptor::finalize() {
  const cudnnStatus_t status = try_finalize();
  if (status != CUDNN_STATUS_SUCCESS) fail_call(status, text_ + ", finalize");
}

std::size_t Descriptor::read(Attribute attribute, cudnnBackendAttributeType_t type,
                             std::size_t room, void* values) const {
  std::int64_t count = 0;
  const cudnnStatus_t status = cudnnBackendGetAttribute(
      descriptor_, attribute.name, type, static_cast<std::int64_t>(room), &count, values);
  if (status != CUDNN_STATUS_SUCCESS) fail_call(status, text_ + ", get " + attribute.text);
  return static_cast<std::size_t>(count);
}

std::int64_t Descriptor::integer(Attribute attribute) const {
  std::int64_t value = 0;
  read(attribute, CUDNN_TYPE_INT64, 1, &value);
  return value;
}

Plan::Plan(std::vector<Descriptor> kept) : kept_(std::move(kept)) {
  const std::int64_t bytes =
      kept_.back().integer(SHERD_CUDNN_ATTRIBUTE(EXECUTION_PLAN_WORKSPACE_SIZE));
  workspace_bytes_ = static_cast<std::size_t>(std::max<std::int64_t>(0, bytes));
}

void Plan::execute(cudnnHandle_t handle, std::span<const Binding> bindings, void* workspace) const {
  std::vector<std::int64_t> ids;
  std::vector<const void*> addresses;
  for (const Binding& binding : bindings) {
    ids.push_back(binding.id);
    addresses.push_back(binding.address);
  }
  Descriptor pack(CUDNN_BACKEND_VARIANT_PACK_DESCRIPTOR, "variant pack");
  pack.set(SHERD_CUDNN_ATTRIBUTE(VARIANT_PACK_UNIQUE_IDS), CUDNN_TYPE_INT64, ids.size(),
           ids.data());
  pack.set(SHERD_CUDNN_ATTRIBUTE(VARIANT_PACK_DATA_POINTERS), CUDNN_TYPE_VOID_PTR, addresses.size(),
           addresses.data());
  pack.set(SHERD_CUDNN_ATTRIBUTE(VARIANT_PACK_WORKSPACE), CUDNN_TYPE_VOID_PTR, workspace);
  pack.finalize();
  const cudnnStatus_t status = cudnnBackendExecute(handle, kept_.back().get(), pack.get());
  if (status != CUDNN_STATUS_SUCCESS) fail_call(status, "cudnnBackendExecute");
}

Descriptor& Graph::keep(Descriptor descriptor) {
  descriptor.finalize();
  return descriptors_.emplace_back(std::move(descriptor));
}

void Graph::add_operation(Descriptor operation) {
  operations_.push_back(keep(std::move(operation)).get());
}

std::int64_t Graph::add_tensor(std::int64_t id, DType dtype, const Extents& sizes,
                               const Extents& strides, bool is_virtual, bool by_value) {
  Descriptor tensor(CUDNN_BACKEND_TENSOR_DESCRIPTOR, fmt::format("tensor {}", id));
  tensor.set(SHERD_CUDNN_ATTRIBUTE(TENSOR_DATA_TYPE), CUDNN_TYPE_DATA_TYPE, type_of(dtype));
  tensor.set(SHERD_CUDNN_ATTRIBUTE(TENSOR_DIMENSIONS), CUDNN_TYPE_INT64, 4, sizes.data());
  tensor.set(SHERD_CUDNN_ATTRIBUTE(TENSOR_STRIDES), CUDNN_TYPE_INT64, 4, strides.data());
  tensor.set(SHERD_CUDNN_ATTRIBUTE(TENSOR_UNIQUE_ID), CUDNN_TYPE_INT64, id);
  tensor.set(SHERD_CUDNN_ATTRIBUTE(TENSOR_BYTE_ALIGNMENT), CUDNN_TYPE_INT64, std::int64_t{16});
  if (is_virtual) tensor.set(SHERD_CUDNN_ATTRIBUTE(TENSOR_IS_VIRTUAL), CUDNN_TYPE_BOOLEAN, true);
  if (by_value) tensor.set(SHERD_CUDNN_ATTRIBUTE(TENSOR_IS_BY_VALUE), CUDNN_TYPE_BOOLEAN, true);
  keep(std::move(tensor));
  tensors_[id] = descriptors_.size() - 1;
  return id;
}

std::int64_t Graph::tensor(std::int64_t id, DType dtype, const Extents& sizes,
                           const Extents& strides) {
  return add_tensor(id, dtype, sizes, strides, false, false);
}

std::int64_t Graph::scalar(std::int64_t id) {
  return add_tensor(id, DType::f32, {1, 1, 1, 1}, {1, 1, 1, 1}, false, true);
}

std::int64_t Graph::between(DType dtype, const Extents& sizes) {
  return between(dtype, sizes, gapless(sizes));
}

std::int64_t Graph::between(DType dtype, const Extents& sizes, const Extents& strides) {
  return add_tensor(next_virtual_++, dtype, sizes, strides, true, false);
}

void Graph::matmul(std::int64_t a, std::int64_t b, std::int64_t out) {
  Descriptor kind(CUDNN_BACKEND_MATMUL_DESCRIPTOR, "matmul");
  kind.set(SHERD_CUDNN_ATTRIBUTE(MATMUL_COMP_TYPE), CUDNN_TYPE_DATA_TYPE, CUDNN_DATA_FLOAT);
  Descriptor operation(CUDNN_BACKEND_OPERATION_MATMUL_DESCRIPTOR, "matmul operation");
  operation.set(SHERD_CUDNN_ATTRIBUTE(OPERATION_MATMUL_DESC), keep(std::move(kind)));
  operation.set(SHERD_CUDNN_ATTRIBUTE(OPERATION_MATMUL_ADESC), at(a));
  operation.set(SHERD_CUDNN_ATTRIBUTE(OPERATION_MATMUL_BDESC), at(b));
  operation.set(SHERD_CUDNN_ATTRIBUTE(OPERATION_MATMUL_CDESC), at(out));
  add_operation(std::move(operation));
}

void Graph::pointwise(cudnnPointwiseMode_t mode, std::int64_t x, std::int64_t b, std::int64_t out) {
  Descriptor kind(CUDNN_BACKEND_POINTWISE_DESCRIPTOR, "pointwise");
  kind.set(SHERD_CUDNN_ATTRIBUTE(POINTWISE_MODE), CUDNN_TYPE_POINTWISE_MODE, mode);
  kind.set(SHERD_CUDNN_ATTRIBUTE(POINTWISE_MATH_PREC), CUDNN_TYPE_DATA_TYPE, CUDNN_DATA_FLOAT);
  Descriptor operation(CUDNN_BACKEND_OPERATION_POINTWISE_DESCRIPTOR, "pointwise operation");
  operation.set(SHERD_CUDNN_ATTRIBUTE(OPERATION_POINTWISE_PW_DESCRIPTOR), keep(std::move(kind)));
  operation.set(SHERD_CUDNN_ATTRIBUTE(OPERATION_POINTWISE_XDESC), at(x));
  if (b != 0) operation.set(SHERD_CUDNN_ATTRIBUTE(OPERATION_POINTWISE_BDESC), at(b));
  operation.set(SHERD_CUDNN_ATTRIBUTE(OPERATION_POINTWISE_YDESC), at(out));
  add_operation(std::move(operation));
}

void Graph::pointwise(cudnnPointwiseMode_t mode, std::int64_t x, std::int64_t out) {
  pointwise(mode, x, 0, out);
}

void Graph::reduce(cudnnReduceTensorOp_t op, std::int64_t x, std::int64_t out) {
  Descriptor kind(CUDNN_BACKEND_REDUCTION_DESCRIPTOR, "reduction");
  kind.set(SHERD_CUDNN_ATTRIBUTE(REDUCTION_OPERATOR), CUDNN_TYPE_REDUCTION_OPERATOR_TYPE, op);
  kind.set(SHERD_CUDNN_ATTRIBUTE(REDUCTION_COMP_TYPE), CUDNN_TYPE_DATA_TYPE, CUDNN_DATA_FLOAT);
  Descriptor operation(CUDNN_BACKEND_OPERATION_REDUCTION_DESCRIPTOR, "reduction operation");
  operation.set(SHERD_CUDNN_ATTRIBUTE(OPERATION_REDUCTION_DESC), keep(std::move(kind)));
  operation.set(SHERD_CUDNN_ATTRIBUTE(OPERATION_REDUCTION_XDESC), at(x));
  operation.set(SHERD_CUDNN_ATTRIBUTE(OPERATION_REDUCTION_YDESC), at(out));
  add_operation(std::move(operation));
}

void Graph::reshape(std::int64_t x, std::int64_t out) {
  Descriptor operation(CUDNN_BACKEND_OPERATION_RESHAPE_DESCRIPTOR, "reshape operation");
  operation.set(SHERD_CUDNN_ATTRIBUTE(OPERATION_RESHAPE_XDESC), at(x));
  operation.set(SHERD_CUDNN_ATTRIBUTE(OPERATION_RESHAPE_YDESC), at(out));
  add_operation(std::move(operation));
}

void Graph::attention_forward(std::int64_t q, std::int64_t k, std::int64_t v, std::int64_t scale,
                              std::int64_t out, std::int64_t lse) {
  Descriptor operation(CUDNN_BACKEND_OPERATION_SDPA_FWD_DESCRIPTOR, "attention operation");
  operation.set(SHERD_CUDNN_ATTRIBUTE(OPERATION_SDPA_FWD_QDESC), at(q));
  operation.set(SHERD_CUDNN_ATTRIBUTE(OPERATION_SDPA_FWD_KDESC), at(k));
  operation.set(SHERD_CUDNN_ATTRIBUTE(OPERATION_SDPA_FWD_VDESC), at(v));
  operation.set(SHERD_CUDNN_ATTRIBUTE(OPERATION_SDPA_FWD_SCALEDESC), at(scale));
  operation.set(SHERD_CUDNN_ATTRIBUTE(OPERATION_SDPA_FWD_ODESC), at(out));
  operation.set(SHERD_CUDNN_ATTRIBUTE(OPERATION_SDPA_FWD_STATSDESC), at(lse));
  add_operation(std::move(operation));
}

Plan Graph::plan(cudnnHandle_t handle) {
  Descriptor graph(CUDNN_BACKEND_OPERATIONGRAPH_DESCRIPTOR, "operation graph");
  graph.set(SHERD_CUDNN_ATTRIBUTE(OPERATIONGRAPH_OPS), CUDNN_TYPE_BACKEND_DESCRIPTOR,
            operations_.size(), operations_.data());
  graph.set(SHERD_CUDNN_ATTRIBUTE(OPERATIONGRAPH_HANDLE), CUDNN_TYPE_HANDLE, handle);
  keep(std::move(graph));
  std::string why = "it proposes none";
  for (const cudnnBackendHeurMode_t mode : {CUDNN_HEUR_MODE_A, CUDNN_HEUR_MODE_FALLBACK}) {
    for (Descriptor& configuration : proposals(descriptors_.back(), mode, &why)) {
      Descriptor plan(CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR, "execution plan");
      plan.set(SHERD_CUDNN_ATTRIBUTE(EXECUTION_PLAN_HANDLE), CUDNN_TYPE_HANDLE, handle);
      plan.set(SHERD_CUDNN_ATTRIBUTE(EXECUTION_PLAN_ENGINE_CONFIG), configuration);
      const cudnnStatus_t status = plan.try_finalize();
      if (status != CUDNN_STATUS_SUCCESS) {
        why = message_of(status, "execution plan, finalize");
        continue;
      }
      descriptors_.push_back(std::move(configuration));
      descriptors_.push_back(std::move(plan));
      return Plan(std::move(descriptors_));
    }
  }
  fail("cuDNN {} has no engine for it: {}", version(), why);
}

}  // namespace sherd::cuda::cudnn
