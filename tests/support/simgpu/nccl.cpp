// NCCL's rules over gloo: what a collective of GPU tensors waits for, and what waits for it.
//
// An asynchronous one runs on a stream of the group's own, behind what the caller's stream holds; wait() makes the
// caller's stream wait for it, and the host for nothing. A synchronous one runs on the caller's stream. Tensors of
// several GPUs, and of the CPU, are refused. The numbers are gloo's, which are those of a run on CPUs. One that waits for
// a kernel that hangs is never begun; once the peers are lost, each one hangs.
#include "clocks.h"

#include <ATen/ATen.h>
#include <c10/core/StreamGuard.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/library.h>

#include <atomic>

namespace simgpu {
namespace {

using at::Tensor;
using c10d::Backend;
using c10d::ReduceOp;
using c10d::Work;
using Tensors = std::vector<Tensor>;
std::atomic<bool> has_lost_peers{false};
constexpr int kAll = -1; // the peer of a collective
template <class T>
using Ptr = c10::intrusive_ptr<T>;

Tensor host_of(const Tensor& tensor) {
  static auto view = c10::Dispatcher::singleton()
                         .findSchemaOrThrow("simgpu::host_view", "")
                         .typed<Tensor(const Tensor&)>();
  return view.call(tensor);
}

Tensors hosts_of(const Tensors& tensors) {
  Tensors made;
  for (const auto& one : tensors)
    made.push_back(host_of(one));
  return made;
}

class StreamWork final : public Work {
 public:
  StreamWork(int rank, c10d::OpType type, Tensors results, Tensors held, c10::Stream stream)
      : Work(rank, type), results_(std::move(results)), held_(std::move(held)), stream_(stream),
        done_(clock_of(key_of(stream))) {}

  // Without a wait, NCCL's watchdog holds the tensors until the collective is over.
  ~StreamWork() override {
    for (const auto& one : held_)
      on_record(one.storage().data(), key_of(stream_));
  }

  bool wait(std::chrono::milliseconds) override {
    synchronize();
    return true;
  }
  void synchronize() override {
    const auto device = stream_.device_index();
    stream_learns(key_of(device, current_stream(device)), done_);
    held_.clear();
  }
  bool isCompleted() override {
    return host_knows(done_);
  }
  bool isSuccess() const override {
    return true;
  }
  std::vector<Tensor> result() override {
    return results_;
  }
  Ptr<c10::ivalue::Future> getFuture() override {
    auto future = c10::make_intrusive<c10::ivalue::Future>(
        c10::ListType::create(c10::TensorType::get()), std::vector<c10::Device>{stream_.device()});
    c10::StreamGuard guard(stream_); // the future's event is recorded there
    future->markCompleted(c10::IValue(results_));
    return future;
  }

 private:
  Tensors results_, held_;
  c10::Stream stream_;
  Clock done_;
};

class SimNccl final : public Backend {
 public:
  explicit SimNccl(Ptr<Backend> gloo) : Backend(gloo->getRank(), gloo->getSize()), gloo_(std::move(gloo)) {}

  const std::string getBackendName() const override {
    return "nccl";
  }
  bool supportsCoalescing() const override {
    return false;
  }
  void setTimeout(std::chrono::milliseconds timeout) override {
    gloo_->setTimeout(timeout);
  }
  void setSequenceNumberForGroup() override {
    gloo_->setSequenceNumberForGroup();
  }
  uint64_t getSequenceNumberForGroup() override {
    return gloo_->getSequenceNumberForGroup();
  }
  void shutdown() override {
    gloo_->shutdown();
  }
  void abort() override {
    gloo_->abort();
  }
  void eagerConnectSingleDevice(at::Device) override {}

  Ptr<Work> broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    return run("broadcast", c10d::OpType::BROADCAST, tensors, tensors, options.asyncOp, [&] {
      auto hosts = hosts_of(tensors);
      gloo_->broadcast(hosts, options)->wait();
    });
  }

  Ptr<Work> allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    return run("all_reduce", c10d::OpType::ALLREDUCE, tensors, tensors, options.asyncOp, [&] {
      auto hosts = hosts_of(tensors);
      auto sums = options;
      sums.reduceOp = scaled(options.reduceOp, hosts);
      gloo_->allreduce(hosts, sums)->wait();
      average(options.reduceOp, hosts);
    });
  }

  Ptr<Work> allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) override {
    Ptr<Work> last;
    for (auto& one : tensors) {
      Tensors alone{one};
      last = allreduce(alone, options);
    }
    return last;
  }

  Ptr<Work> reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
    return run("reduce", c10d::OpType::REDUCE, tensors, tensors, options.asyncOp, [&] {
      auto hosts = hosts_of(tensors);
      gloo_->reduce(hosts, options)->wait();
    });
  }

  Ptr<Work> allgather(
      std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    return run("all_gather", c10d::OpType::ALLGATHER, inputs, outputs.at(0), options.asyncOp, [&] {
      std::vector<Tensors> to{hosts_of(outputs.at(0))};
      auto from = hosts_of(inputs);
      gloo_->allgather(to, from, options)->wait();
    });
  }

  Ptr<Work> _allgather_base(Tensor& output, Tensor& input, const c10d::AllgatherOptions& options) override {
    return run("all_gather_into_tensor", c10d::OpType::_ALLGATHER_BASE, {input}, {output}, options.asyncOp, [&] {
      auto to = host_of(output), from = host_of(input);
      gloo_->_allgather_base(to, from, options)->wait();
    });
  }

  Ptr<Work> gather(
      std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& options) override {
    const Tensors results = outputs.empty() ? Tensors{} : outputs.at(0);
    return run("gather", c10d::OpType::GATHER, inputs, results, options.asyncOp, [&] {
      std::vector<Tensors> to;
      if (!outputs.empty())
        to.push_back(hosts_of(results));
      auto from = hosts_of(inputs);
      gloo_->gather(to, from, options)->wait();
    });
  }

  Ptr<Work> _reduce_scatter_base(
      Tensor& output, Tensor& input, const c10d::ReduceScatterOptions& options) override {
    return run("reduce_scatter_tensor", c10d::OpType::_REDUCE_SCATTER_BASE, {input}, {output}, options.asyncOp, [&] {
      Tensors from{host_of(input).clone()}; // NCCL leaves the input as it is
      auto to = host_of(output);
      auto sums = options;
      sums.reduceOp = scaled(options.reduceOp, from);
      gloo_->_reduce_scatter_base(to, from[0], sums)->wait();
      average(options.reduceOp, {to});
    });
  }

  Ptr<Work> alltoall_base(
      Tensor& output,
      Tensor& input,
      std::vector<int64_t>& output_sizes,
      std::vector<int64_t>& input_sizes,
      const c10d::AllToAllOptions& options) override {
    return run("all_to_all_single", c10d::OpType::ALLTOALL_BASE, {input}, {output}, options.asyncOp, [&] {
      auto to = host_of(output), from = host_of(input);
      gloo_->alltoall_base(to, from, output_sizes, input_sizes, options)->wait();
    });
  }

  // Between two processes NCCL has a stream of its own.
  Ptr<Work> send(Tensors& tensors, int to, int tag) override {
    return run("send", c10d::OpType::SEND, tensors, {}, true, [&] {
      auto hosts = hosts_of(tensors);
      gloo_->send(hosts, to, tag)->wait();
    }, to);
  }

  Ptr<Work> recv(Tensors& tensors, int from, int tag) override {
    return run("recv", c10d::OpType::RECV, {}, tensors, true, [&] {
      auto hosts = hosts_of(tensors);
      gloo_->recv(hosts, from, tag)->wait();
    }, from);
  }

  Ptr<Work> barrier(const c10d::BarrierOptions& options) override {
    count(kHostWaits);
    gloo_->barrier(options)->wait();
    auto one = at::empty({1}, at::device(c10::Device(c10::DeviceType::CUDA, current())));
    return run("barrier", c10d::OpType::BARRIER, {one}, {one}, options.asyncOp, [] {});
  }

 private:
  static c10::DeviceIndex current() {
    return c10::impl::VirtualGuardImpl(c10::DeviceType::CUDA).getDevice().index();
  }

  template <class Exchange>
  Ptr<Work> run(
      const std::string& name, c10d::OpType type, Tensors reads, Tensors writes, bool is_async, Exchange exchange,
      int peer = kAll) {
    Tensors all = reads;
    all.insert(all.end(), writes.begin(), writes.end());
    const auto device = all.at(0).device();
    for (const auto& one : all)
      TORCH_CHECK(one.is_cuda() && one.device() == device, name, ": NCCL takes tensors of one GPU, got ",
                  one.device(), " beside ", device);
    const c10::impl::VirtualGuardImpl guard(c10::DeviceType::CUDA);
    const auto before = guard.getStream(device);
    const auto stream = is_async ? own_stream(device, peer) : before;
    const auto key = key_of(stream);
    stream_learns(key, clock_of(key_of(before)));
    count(kKernels);
    for (const auto& one : reads)
      on_access(one.storage().data(), false, key, name);
    if (has_lost_peers)
      hang(key);
    if (!hangs(clock_of(key)))
      exchange();
    for (const auto& one : writes)
      on_access(one.storage().data(), true, key, name);
    return c10::make_intrusive<StreamWork>(getRank(), type, writes, all, stream);
  }

  c10::Stream own_stream(c10::Device device, int peer) {
    const std::pair key(device.index(), peer);
    auto found = streams_.find(key);
    if (found == streams_.end())
      found = streams_.emplace(key, c10::Stream(c10::Stream::UNSAFE, device, new_stream())).first;
    return found->second;
  }

  // gloo knows neither a factor before the sum nor an average.
  static ReduceOp scaled(const ReduceOp& op, const Tensors& tensors) {
    if (op.op_ == ReduceOp::PREMUL_SUM) {
      const auto* factor = static_cast<const c10d::PreMulSumSupplement*>(op.supplement_.get());
      for (auto one : tensors)
        one.mul_(factor->tensor_factor.defined() ? factor->tensor_factor.item().toDouble() : factor->double_factor);
    }
    return op.op_ == ReduceOp::PREMUL_SUM || op.op_ == ReduceOp::AVG ? ReduceOp(ReduceOp::SUM) : op;
  }

  void average(const ReduceOp& op, const Tensors& tensors) const {
    if (op.op_ == ReduceOp::AVG)
      for (auto one : tensors)
        one.div_(getSize());
  }

  Ptr<Backend> gloo_;
  std::map<std::pair<c10::DeviceIndex, int>, c10::Stream> streams_; // of a GPU, for a peer
};

// Let a group, whose backend for GPUs is gloo, follow NCCL's rules there.
void follow_nccl(const Ptr<c10d::ProcessGroup>& group) {
  const auto gloo = group->getBackend(c10::DeviceType::CUDA);
  auto nccl = c10::make_intrusive<SimNccl>(gloo);
  nccl->setGroupUid(gloo->getGroupUid());
  nccl->setGroupDesc(gloo->getGroupDesc());
  group->setBackend(c10::DeviceType::CUDA, c10d::ProcessGroup::CUSTOM, Ptr<Backend>(nccl));
}

} // namespace

TORCH_LIBRARY_FRAGMENT(simgpu, library) {
  library.def("follow_nccl", follow_nccl);
  library.def("lose_peers() -> ()", [] { has_lost_peers = true; });
}

} // namespace simgpu
