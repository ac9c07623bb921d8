// torch's device type CUDA in the memory of the host.
//
// Tensors say that they are on cuda:0 ... cuda:7, and have addresses that the host cannot read. A kernel is the CPU's own, run at once on the same memory by a boxed
// fallback, so the numbers are those of a CPU. What is of a GPU are its rules: each kernel belongs to a stream
// (clocks.h), a GPU has a generator of its own, a copy to pinned memory holds garbage until the host has waited, and a
// reduction adds in another order where its input does not begin at a multiple of 16 bytes.
#include "clocks.h"

#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/distributed/c10d/reducer_timer.hpp>
#include <torch/library.h>

#include <array>
#include <atomic>
#include <cstring>
#include <mutex>
#include <numeric>
#include <unordered_set>

namespace simgpu {

using c10::Device;
using c10::DeviceIndex;
using c10::DeviceType;
using c10::Stream;

namespace {

thread_local DeviceIndex current_device = 0; // CUDA's default in each new thread

void set_device(DeviceIndex device, const std::string& by) {
  if (device == current_device)
    return; // as c10::cuda::SetDevice, which then calls nothing of CUDA
  on_context(device, by);
  current_device = device;
}

StreamKey current_key(DeviceIndex device) {
  return key_of(device, current_stream(device));
}

std::atomic<bool> waits_raise{false}; // torch.cuda.set_sync_debug_mode("error")

// The host waits for a kernel's result, as torch.cuda's debug mode sees it; to wait for an event is no such thing.
void host_waits_on(StreamKey stream) {
  TORCH_CHECK(!waits_raise, "called a synchronizing CUDA operation");
  count(kHostWaits);
  host_learns(clock_of(stream));
}

// --- devices, streams, events ----------------------------------------------------------------------------------------

struct Event {
  Clock clock;
};

struct Guard final : public c10::impl::DeviceGuardImplInterface {
  DeviceType type() const override {
    return DeviceType::CUDA;
  }
  DeviceIndex index(Device device) const {
    return device.index() < 0 ? current_device : device.index();
  }
  DeviceIndex deviceCount() const noexcept override {
    return kDevices;
  }
  Device getDevice() const override {
    return Device(type(), current_device);
  }
  Device exchangeDevice(Device device) const override {
    Device before = getDevice();
    set_device(index(device), "a guard for a tensor or a stream");
    return before;
  }
  // As torch does: a GPU without a context is only noted as the current one.
  void setDevice(Device device) const override {
    current_device = index(device);
  }
  void uncheckedSetDevice(Device device) const noexcept override {
    current_device = index(device);
  }

  Stream getStream(Device device) const override {
    const auto at = index(device);
    return Stream(Stream::UNSAFE, Device(type(), at), current_stream(at));
  }
  Stream getDefaultStream(Device device) const override {
    return Stream(Stream::DEFAULT, Device(type(), index(device)));
  }
  Stream getNewStream(Device device, int) const override {
    on_context(index(device), "a stream");
    return Stream(Stream::UNSAFE, Device(type(), index(device)), new_stream());
  }
  Stream getStreamFromGlobalPool(Device device, bool) const override {
    return getNewStream(device, 0);
  }
  Stream exchangeStream(Stream stream) const override {
    auto before = getStream(stream.device());
    set_current_stream(stream.device_index(), stream.id());
    return before;
  }

  void record(void** event, const Stream& stream, const DeviceIndex, const c10::EventFlag) const override {
    on_context(stream.device_index(), "an event");
    if (*event == nullptr)
      *event = new Event();
    static_cast<Event*>(*event)->clock = clock_of(key_of(stream));
  }
  void block(void* event, const Stream& stream) const override {
    on_context(stream.device_index(), "a stream's wait for an event");
    if (event != nullptr)
      stream_learns(key_of(stream), static_cast<Event*>(event)->clock);
  }
  // An event counts as done once the host has waited for it, or for one behind it: a GPU may be as slow as that.
  bool queryEvent(void* event) const override {
    on_context(current_device, "a look at an event");
    return event == nullptr || host_knows(static_cast<Event*>(event)->clock);
  }
  bool queryStream(const Stream& stream) const override {
    on_context(stream.device_index(), "a look at a stream");
    return host_knows(clock_of(key_of(stream)));
  }
  void synchronizeEvent(void* event) const override {
    on_context(current_device, "a wait for an event");
    count(kHostWaits);
    if (event != nullptr)
      host_learns(static_cast<Event*>(event)->clock);
  }
  void synchronizeStream(const Stream& stream) const override {
    on_context(stream.device_index(), "a wait for a stream");
    count(kHostWaits);
    host_learns(clock_of(key_of(stream)));
  }
  void synchronizeDevice(const DeviceIndex device) const override {
    on_context(device, "a wait for a GPU");
    count(kHostWaits);
    host_learns(clock_of_device(device));
  }
  void destroyEvent(void* event, const DeviceIndex) const noexcept override {
    delete static_cast<Event*>(event);
  }
  double elapsedTime(void*, void*, const DeviceIndex) const override {
    return 0.01; // milliseconds
  }
  void recordDataPtrOnStream(const c10::DataPtr& memory, const Stream& stream) const override {
    on_record(memory.get(), key_of(stream));
  }
};

// --- memory ----------------------------------------------------------------------------------------------------------

constexpr int64_t kMemory = int64_t(2) << 30; // bytes of a GPU
std::array<std::atomic<int64_t>, kDevices> allocated{};
std::array<std::atomic<int64_t>, kDevices> retried{}; // allocations for which there was no memory

// A GPU's address is the host's with this bit, where a process has no memory: host code that reads it is killed.
constexpr uintptr_t kOnDevice = uintptr_t(1) << 52;

void* device_address(void* host) {
  return host == nullptr ? host : reinterpret_cast<void*>(reinterpret_cast<uintptr_t>(host) | kOnDevice);
}

void* host_address(const void* device) {
  return reinterpret_cast<void*>(reinterpret_cast<uintptr_t>(device) & ~kOnDevice);
}

struct Block {
  void* memory; // the host's address
  at::Tensor owner; // of the CPU's own memory, if a CPU kernel has made it
  size_t bytes;
  DeviceIndex device;
};

void release(void* context) {
  auto* block = static_cast<Block*>(context);
  allocated[block->device] -= block->bytes;
  on_release(device_address(block->memory));
  if (!block->owner.defined())
    free(block->memory);
  delete block;
}

c10::DataPtr on_device(void* memory, at::Tensor owner, size_t bytes, DeviceIndex device) {
  on_context(device, "an allocation");
  auto* address = device_address(memory);
  on_allocation(address, current_key(device));
  allocated[device] += bytes;
  auto* block = new Block{host_address(memory), std::move(owner), bytes, device};
  return c10::DataPtr(address, block, release, Device(DeviceType::CUDA, device));
}

struct DeviceAllocator final : public c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    if (allocated[current_device] + static_cast<int64_t>(bytes) > kMemory)
      ++retried[current_device]; // torch's own allocator frees what it keeps, and tries once more: here it keeps nothing
    TORCH_CHECK_WITH(OutOfMemoryError, allocated[current_device] + static_cast<int64_t>(bytes) <= kMemory,
                     "CUDA out of memory. Tried to allocate ", bytes, " bytes of a simulated GPU.");
    void* memory = nullptr;
    TORCH_CHECK(!bytes || !posix_memalign(&memory, 64, bytes), "no memory");
    return on_device(memory, {}, bytes, current_device);
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return nullptr;
  }
  void copy_data(void* to, const void* from, std::size_t bytes) const override {
    std::memcpy(host_address(to), host_address(from), bytes);
  }
};
DeviceAllocator device_allocator;

std::mutex pinned_lock;
std::map<const char*, size_t> pinned; // start and size

bool is_pinned(const void* memory) {
  std::lock_guard<std::mutex> locked(pinned_lock);
  const auto* at = static_cast<const char*>(memory);
  auto after = pinned.upper_bound(at);
  return after != pinned.begin() && at < std::prev(after)->first + std::prev(after)->second;
}

void unpin(void* memory) {
  {
    std::lock_guard<std::mutex> locked(pinned_lock);
    pinned.erase(static_cast<const char*>(memory));
  }
  free(memory);
}

// cudaHostRegister and its inverse: memory that somebody else has allocated.
int64_t host_register(int64_t address, int64_t bytes) {
  on_context(current_device, "memory that is pinned");
  std::lock_guard<std::mutex> locked(pinned_lock);
  pinned[reinterpret_cast<const char*>(address)] = static_cast<size_t>(bytes);
  return 0;
}

int64_t host_unregister(int64_t address) {
  std::lock_guard<std::mutex> locked(pinned_lock);
  return pinned.erase(reinterpret_cast<const char*>(address)) ? 0 : 1;
}

struct PinnedAllocator final : public c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    if (!has_any_context()) // torch's own takes a GPU that has one
      on_context(current_device, "pinned memory");
    void* memory = nullptr;
    TORCH_CHECK(!posix_memalign(&memory, 64, std::max<size_t>(bytes, 1)), "no memory");
    std::lock_guard<std::mutex> locked(pinned_lock);
    pinned[static_cast<const char*>(memory)] = std::max<size_t>(bytes, 1);
    return c10::DataPtr(memory, memory, unpin, Device(DeviceType::CPU));
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return unpin;
  }
  void copy_data(void* to, const void* from, std::size_t bytes) const override {
    std::memcpy(to, from, bytes);
  }
};
PinnedAllocator pinned_allocator;

// --- generators ------------------------------------------------------------------------------------------------------

const at::Generator& generator_of(DeviceIndex device) {
  static std::vector<at::Generator> generators = [] {
    std::vector<at::Generator> made;
    for (int number = 0; number < kDevices; number++)
      made.push_back(at::make_generator<at::CPUGeneratorImpl>());
    return made;
  }();
  return generators.at(device);
}

// While it lives, kernels of the CPU that take no generator draw from the GPU's.
struct DrawsOnDevice {
  explicit DrawsOnDevice(DeviceIndex device) : own_(generator_of(device)), locked_(lock()) {
    before_ = host().get_state();
    host().set_state(own_.get_state());
  }
  ~DrawsOnDevice() {
    own_.set_state(host().get_state());
    host().set_state(before_);
  }

 private:
  static std::mutex& lock() {
    static std::mutex one;
    return one;
  }
  static at::Generator host() {
    return at::detail::getDefaultCPUGenerator();
  }
  at::Generator own_;
  at::Tensor before_;
  std::lock_guard<std::mutex> locked_;
};

// --- what torch asks a build for CUDA --------------------------------------------------------------------------------

struct Hooks final : public at::CUDAHooksInterface {
  explicit Hooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override {
    return true;
  }
  bool isBuilt() const override {
    return true;
  }
  bool isAvailable() const override {
    return true;
  }
  bool hasPrimaryContext(DeviceIndex device) const override {
    return has_context(device);
  }
  DeviceIndex current_device() const override {
    return simgpu::current_device;
  }
  DeviceIndex deviceCount() const override {
    return kDevices;
  }
  int getNumGPUs() const override {
    return kDevices;
  }
  void setCurrentDevice(DeviceIndex device) const override {
    set_device(device, "a call of the accelerator");
  }
  DeviceIndex getCurrentDevice() const override {
    return simgpu::current_device;
  }
  DeviceIndex exchangeDevice(DeviceIndex device) const override {
    const auto before = simgpu::current_device;
    set_device(device, "a call of the accelerator");
    return before;
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex device) const override {
    const auto before = simgpu::current_device;
    simgpu::current_device = device;
    return before;
  }
  c10::Allocator* getPinnedMemoryAllocator() const override {
    return &pinned_allocator;
  }
  bool isPinnedPtr(const void* memory) const override {
    return is_pinned(memory);
  }
  c10::Allocator* getCUDADeviceAllocator() const override {
    return &device_allocator;
  }
  Device getDeviceFromPtr(void*) const override {
    return Device(DeviceType::CUDA, simgpu::current_device);
  }
  const at::Generator& getDefaultGenerator(DeviceIndex device) const override {
    return generator_of(device < 0 ? simgpu::current_device : device);
  }
  at::Generator getNewGenerator(DeviceIndex) const override {
    return at::make_generator<at::CPUGeneratorImpl>();
  }
};

// --- kernels ---------------------------------------------------------------------------------------------------------

bool is_cuda(const at::Tensor& tensor) {
  return tensor.defined() && tensor.device().type() == DeviceType::CUDA;
}

// The arguments of one kernel as tensors of the CPU on the same memory, and back.
class HostViews {
 public:
  at::Tensor to_host(const at::Tensor& tensor) {
    auto storage = tensor.storage();
    auto* key = storage.unsafeGetStorageImpl();
    auto found = hosts_.find(key);
    if (found == hosts_.end()) {
      void* memory = host_address(key->mutable_data());
      c10::DataPtr borrowed(memory, memory, [](void*) {}, Device(DeviceType::CPU));
      c10::Storage made(
          c10::Storage::use_byte_size_t(), key->nbytes(), std::move(borrowed), c10::GetCPUAllocator(), true);
      originals_.emplace(made.unsafeGetStorageImpl(), tensor);
      found = hosts_.emplace(key, std::move(made)).first;
    }
    auto host = at::detail::make_tensor<c10::TensorImpl>(
        c10::Storage(found->second), c10::DispatchKeySet(c10::DispatchKey::CPU), tensor.dtype());
    like(host, tensor);
    if (tensor.unsafeGetTensorImpl()->is_wrapped_number())
      host.unsafeGetTensorImpl()->set_wrapped_number(true);
    tensors_.emplace(host.unsafeGetTensorImpl(), tensor);
    pairs_.emplace_back(host, tensor);
    return host;
  }

  // What a kernel has returned: an argument, a view of one, or new memory.
  at::Tensor to_device(const at::Tensor& made, DeviceIndex device) {
    if (!made.defined())
      return made;
    if (auto same = tensors_.find(made.unsafeGetTensorImpl()); same != tensors_.end())
      return same->second;
    at::Tensor tensor;
    if (auto view = originals_.find(made.storage().unsafeGetStorageImpl()); view != originals_.end()) {
      tensor = at::detail::make_tensor<c10::TensorImpl>(
          c10::TensorImpl::VIEW, c10::Storage(view->second.storage()), view->second.key_set(), made.dtype());
    } else {
      auto memory = on_device(made.storage().mutable_data(), made, made.storage().nbytes(), device);
      c10::Storage storage(
          c10::Storage::use_byte_size_t(), made.storage().nbytes(), std::move(memory), &device_allocator, true);
      tensor = at::detail::make_tensor<c10::TensorImpl>(
          std::move(storage), c10::DispatchKeySet(c10::DispatchKey::CUDA), made.dtype());
    }
    like(tensor, made);
    return tensor;
  }

  // Give the arguments the sizes and the memory that a kernel has given to their views.
  void take_back_sizes(DeviceIndex device) {
    for (auto& [host, tensor] : pairs_) {
      auto* from = host.storage().unsafeGetStorageImpl();
      auto* to = tensor.storage().unsafeGetStorageImpl();
      if (host_address(from->data()) != host_address(to->data())) {
        to->set_data_ptr_noswap(on_device(from->mutable_data(), host, from->nbytes(), device));
        to->set_nbytes(from->nbytes());
      }
      if (host.sizes() != tensor.sizes() || host.strides() != tensor.strides())
        tensor.unsafeGetTensorImpl()->set_sizes_and_strides(host.sizes(), host.strides());
    }
  }

 private:
  static void like(const at::Tensor& tensor, const at::Tensor& other) {
    tensor.unsafeGetTensorImpl()->set_storage_offset(other.storage_offset());
    tensor.unsafeGetTensorImpl()->set_sizes_and_strides(other.sizes(), other.strides());
    tensor._set_conj(other.is_conj());
    tensor._set_neg(other.is_neg());
  }

  std::map<c10::StorageImpl*, c10::Storage> hosts_;       // of a device's storage
  std::map<c10::StorageImpl*, at::Tensor> originals_;     // of a host's storage
  std::map<c10::TensorImpl*, at::Tensor> tensors_;        // of a host's tensor
  std::vector<std::pair<at::Tensor, at::Tensor>> pairs_; // host, device
};

// The host waits for these: it needs their result to go on.
const std::unordered_set<std::string> kWaiting = {
    "aten::nonzero", "aten::equal", "aten::is_nonzero", "aten::masked_select", "aten::_unique2", "aten::unique_dim",
    "aten::unique_consecutive", "aten::repeat_interleave", "aten::bincount"};
const std::unordered_set<std::string> kNoKernel = {
    "aten::empty_like", "aten::new_empty", "aten::resize_", "aten::set_", "aten::detach", "aten::lift_fresh"};

// CUDA's kernels read 16 bytes at once, if they may: the numbers of a tensor that begins elsewhere they add in another
// order. Here they add those in reverse. Of half precision an H200 showed none of that.
const std::unordered_set<std::string> kReductions = {
    "aten::sum", "aten::nansum", "aten::mean", "aten::prod", "aten::norm", "aten::linalg_vector_norm",
    "aten::_foreach_norm", "aten::var", "aten::std", "aten::var_mean", "aten::std_mean"};
constexpr uintptr_t kAligned = 16; // bytes

at::Tensor in_cudas_order(const at::Tensor& host, const std::optional<std::vector<int64_t>>& dims) {
  const bool is_wide = host.scalar_type() == at::kFloat || host.scalar_type() == at::kDouble;
  if (!is_wide || reinterpret_cast<uintptr_t>(host.data_ptr()) % kAligned == 0)
    return host;
  std::vector<int64_t> every(host.dim());
  std::iota(every.begin(), every.end(), 0);
  return host.flip(dims.has_value() && !dims->empty() ? *dims : every);
}

bool is_mask(const at::Tensor& tensor) {
  return tensor.defined() && (tensor.scalar_type() == at::kBool || tensor.scalar_type() == at::kByte);
}

class Call {
 public:
  Call(const c10::OperatorHandle& op, torch::jit::Stack& stack) : op_(op), schema_(op.schema()), stack_(stack) {
    for (const auto& result : schema_.returns())
      is_view_ |= result.alias_info() != nullptr && !result.alias_info()->isWrite();
    begin_ = stack.size() - schema_.arguments().size();
  }

  void run() {
    find_device();
    for (size_t number = 0; number < schema_.arguments().size(); number++) {
      const auto* alias = schema_.arguments()[number].alias_info();
      take(stack_[begin_ + number], alias != nullptr && alias->isWrite());
    }
    if (!is_view_ && !kNoKernel.count(schema_.name()))
      count(kKernels);
    if (kWaiting.count(schema_.name()) || indexes_by_mask_)
      host_waits_on(current_key(device_));
    {
      c10::impl::ExcludeDispatchKeyGuard plain(
          c10::autograd_dispatch_keyset | c10::DispatchKeySet(c10::DispatchKey::ADInplaceOrView));
      std::optional<DrawsOnDevice> draws;
      if (op_.hasTag(at::Tag::nondeterministic_seeded) && !has_generator_)
        draws.emplace(device_);
      if (kReductions.count(schema_.name()))
        reorder();
      op_.callBoxed(&stack_);
    }
    views_.take_back_sizes(device_);
    for (size_t at = stack_.size() - schema_.returns().size(); at < stack_.size(); at++)
      give_back(stack_[at]);
  }

 private:
  void find_device() {
    device_ = current_device;
    for (size_t at = begin_; at < stack_.size(); at++) {
      const auto& value = stack_[at];
      if (value.isDevice() && value.toDevice().has_index())
        device_ = value.toDevice().index();
      if (value.isTensor() && is_cuda(value.toTensor())) {
        device_ = value.toTensor().device().index();
        return;
      }
      if (value.isTensorList())
        for (const at::Tensor& tensor : value.toTensorVector())
          if (is_cuda(tensor)) {
            device_ = tensor.device().index();
            return;
          }
    }
  }

  void reorder() {
    std::optional<std::vector<int64_t>> dims;
    if (const auto at = schema_.argumentIndexWithName("dim"); at && stack_[begin_ + *at].isIntList())
      dims = stack_[begin_ + *at].toIntVector();
    auto& value = stack_[begin_];
    if (value.isTensor()) {
      value = in_cudas_order(value.toTensor(), dims);
    } else {
      auto tensors = value.toTensorVector();
      for (auto& one : tensors)
        one = in_cudas_order(one, {});
      value = c10::IValue(c10::List<at::Tensor>(tensors));
    }
  }

  at::Tensor taken(const at::Tensor& tensor, bool writes) {
    if (!is_cuda(tensor))
      return tensor;
    if (!is_view_)
      on_access(tensor.storage().data(), writes, current_key(device_), schema_.name());
    return views_.to_host(tensor);
  }

  void take(c10::IValue& value, bool writes) {
    if (value.isTensor()) {
      value = taken(value.toTensor(), writes);
    } else if (value.isTensorList()) {
      auto tensors = value.toTensorVector();
      for (auto& one : tensors)
        one = taken(one, writes);
      value = c10::IValue(c10::List<at::Tensor>(tensors));
    } else if (value.isOptionalTensorList()) { // the indices of index and index_put
      c10::List<std::optional<at::Tensor>> tensors;
      for (std::optional<at::Tensor> one : value.toOptionalTensorList()) {
        indexes_by_mask_ |= one.has_value() && is_mask(*one);
        tensors.push_back(one ? std::optional<at::Tensor>(taken(*one, writes)) : one);
      }
      value = c10::IValue(tensors);
    } else if (value.isDevice() && value.toDevice().is_cuda()) {
      value = c10::IValue(Device(DeviceType::CPU));
    } else if (value.isGenerator()) {
      has_generator_ = true;
    }
  }

  at::Tensor given_back(const at::Tensor& tensor) {
    auto made = views_.to_device(tensor, device_);
    if (!is_view_ && is_cuda(made) && !kNoKernel.count(schema_.name()))
      on_access(made.storage().data(), true, current_key(device_), schema_.name());
    return made;
  }

  void give_back(c10::IValue& value) {
    if (value.isTensor()) {
      value = given_back(value.toTensor());
    } else if (value.isTensorList()) {
      auto tensors = value.toTensorVector();
      for (auto& one : tensors)
        one = given_back(one);
      value = c10::IValue(c10::List<at::Tensor>(tensors));
    }
  }

  const c10::OperatorHandle& op_;
  const c10::FunctionSchema& schema_;
  torch::jit::Stack& stack_;
  size_t begin_;
  HostViews views_;
  DeviceIndex device_ = 0;
  bool is_view_ = false;
  bool indexes_by_mask_ = false;
  bool has_generator_ = false;
};

void run_on_host(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
  Call(op, *stack).run();
}

at::Tensor host_view(const at::Tensor& tensor) {
  HostViews views;
  return is_cuda(tensor) ? views.to_host(tensor) : tensor;
}

void copy_on_host(const at::Tensor& to, const at::Tensor& from) {
  c10::impl::ExcludeDispatchKeyGuard plain(
      c10::autograd_dispatch_keyset | c10::DispatchKeySet(c10::DispatchKey::ADInplaceOrView));
  host_view(to).copy_(host_view(from));
}

void fill_with_garbage(const at::Tensor& tensor) {
  if (tensor.is_non_overlapping_and_dense())
    std::memset(tensor.data_ptr(), tensor.scalar_type() == at::kBool ? 1 : 0xff, tensor.nbytes());
}

// While it lives, allocations are on a device.
struct On {
  explicit On(std::optional<Device> device) : before(current_device) {
    if (device.has_value() && device->has_index())
      current_device = device->index();
  }
  ~On() {
    current_device = before;
  }
  DeviceIndex before;
};

at::Tensor empty(
    at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  On on(device);
  return at::detail::empty_generic(
      size, &device_allocator, c10::DispatchKeySet(c10::DispatchKey::CUDA), c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(
    at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<Device> device, std::optional<bool>) {
  On on(device);
  return at::detail::empty_strided_generic(
      size, stride, &device_allocator, c10::DispatchKeySet(c10::DispatchKey::CUDA), c10::dtype_or_default(dtype));
}

// A copy runs on the stream of the GPU that it reads, or else of the one that it writes.
at::Tensor& copy_(at::Tensor& to, const at::Tensor& from, bool non_blocking) {
  const auto device = is_cuda(from) ? from.device().index() : to.device().index();
  const auto stream = current_key(device);
  const bool is_between_gpus = is_cuda(from) && is_cuda(to) && from.device() != to.device();
  const auto other = is_between_gpus ? current_key(to.device().index()) : stream;
  count(is_cuda(from) && is_cuda(to) && !is_between_gpus ? kKernels : kCopies);
  stream_learns(stream, clock_of(other)); // torch orders the two GPUs' streams before and after
  if (is_cuda(from))
    on_access(from.storage().data(), false, stream, "copy_");
  if (is_cuda(to))
    on_access(to.storage().data(), true, stream, "copy_");
  stream_learns(other, clock_of(stream));
  const bool is_with_host = !is_cuda(to) || !is_cuda(from);
  if (is_with_host && !non_blocking)
    host_waits_on(stream);
  if (!is_cuda(to) && non_blocking && is_pinned(to.data_ptr())) {
    auto copied = host_view(from).clone();
    fill_with_garbage(to);
    on_copy_to_host(stream, [to, copied] { copy_on_host(to, copied); });
  } else {
    copy_on_host(to, from);
  }
  return to;
}

void record_stream(at::Tensor& tensor, Stream stream) {
  on_record(tensor.storage().data(), key_of(stream));
}

at::Scalar local_scalar(const at::Tensor& tensor) {
  const auto stream = current_key(tensor.device().index());
  on_access(tensor.storage().data(), false, stream, "item");
  host_waits_on(stream);
  return host_view(tensor).item();
}

// As FSDP frees and allocates what it has gathered.
void resize_storage(c10::Storage storage, int64_t bytes) {
  auto* memory = storage.unsafeGetStorageImpl();
  On on(memory->device());
  memory->set_data_ptr_noswap(device_allocator.allocate(bytes));
  memory->set_nbytes(bytes);
}

struct DdpTimer final : public c10d::Timer {
  explicit DdpTimer(c10::Device) {}
  std::optional<int64_t> measureDifference(Event, Event) override {
    return 0;
  }
};

} // namespace

} // namespace simgpu

C10_REGISTER_GUARD_IMPL(CUDA, simgpu::Guard)
REGISTER_ALLOCATOR(c10::DeviceType::CUDA, &simgpu::device_allocator)

using at::CUDAHooksRegistry;
using at::RegistererCUDAHooksRegistry;
namespace {
C10_REGISTER_TYPED_CLASS(CUDAHooksRegistry, "CUDAHooks", simgpu::Hooks)
}
namespace c10d {
C10_REGISTER_TYPED_CLASS(TimerRegistry, c10::kCUDA, simgpu::DdpTimer)
}

TORCH_LIBRARY_IMPL(_, CUDA, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&simgpu::run_on_host>());
}
TORCH_LIBRARY_IMPL(aten, CUDA, library) {
  library.impl("empty.memory_format", simgpu::empty);
  library.impl("empty_strided", simgpu::empty_strided);
  library.impl("copy_", simgpu::copy_);
  library.impl("record_stream", simgpu::record_stream);
  library.impl("_local_scalar_dense", simgpu::local_scalar);
}
TORCH_LIBRARY(simgpu, library) {
  library.def("set_device(int device, str by) -> ()", [](int64_t device, std::string by) {
    simgpu::set_device(static_cast<c10::DeviceIndex>(device), by);
  });
  library.def("note_device(int device) -> ()", [](int64_t device) {
    simgpu::current_device = static_cast<c10::DeviceIndex>(device);
  });
  library.def("device() -> int", [] { return static_cast<int64_t>(simgpu::current_device); });
  library.def("stream(int device) -> int", [](int64_t device) {
    return simgpu::current_stream(static_cast<c10::DeviceIndex>(device));
  });
  library.def("set_stream(int device, int stream) -> ()", [](int64_t device, int64_t stream) {
    simgpu::set_current_stream(static_cast<c10::DeviceIndex>(device), stream);
  });
  library.def("synchronize(int device) -> ()", [](int64_t device) {
    simgpu::Guard().synchronizeDevice(static_cast<c10::DeviceIndex>(device));
  });
  library.def("generator(int device) -> Generator?", [](int64_t device) {
    return std::optional<at::Generator>(simgpu::generator_of(static_cast<c10::DeviceIndex>(device)));
  });
  library.def("raise_at_waits(bool on) -> ()", [](bool on) { simgpu::waits_raise = on; });
  library.def("host_register(int address, int bytes) -> int", simgpu::host_register);
  library.def("host_unregister(int address) -> int", simgpu::host_unregister);
  library.def("memory() -> int", [] { return simgpu::kMemory; });
  library.def("allocated(int device) -> int", [](int64_t device) { return simgpu::allocated.at(device).load(); });
  library.def("retried(int device) -> int", [](int64_t device) { return simgpu::retried.at(device).load(); });
  library.def("resize_storage(Storage storage, int bytes) -> ()", simgpu::resize_storage);
  library.def("host_view(Tensor tensor) -> Tensor", simgpu::host_view);
}
