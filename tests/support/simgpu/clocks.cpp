#include "clocks.h"

#include <torch/library.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <list>
#include <mutex>
#include <thread>
#include <unordered_map>

namespace simgpu {
namespace {

struct Access {
  StreamKey stream = -1; // -1: none
  int64_t number = 0;    // of the kernel on its stream
  std::string kernel;
};

struct Memory {
  StreamKey home = -1; // the stream that allocated it
  Access write;
  std::map<StreamKey, Access> reads; // since the last write
  std::set<StreamKey> recorded;
};

struct CopyToHost {
  StreamKey stream;
  int64_t number;
  std::function<void()> run;
};

constexpr size_t kMostRaces = 50;
constexpr StreamKey kStreams = 1000000; // of a device at most

std::recursive_mutex lock;
bool watches = false;
std::map<StreamKey, Clock> clocks;
Clock host; // of all threads together: they hand work to each other in ways that no call of CUDA shows
std::unordered_map<const void*, Memory> memories;
std::map<StreamKey, std::vector<Access>> in_flight; // what may still use memory that a stream may hand out again
std::list<CopyToHost> copies;
std::map<StreamKey, int64_t> hung; // a stream's kernel that never ends
std::vector<std::string> races;
std::map<c10::DeviceIndex, std::string> contexts; // that a test has not been told to forget
std::set<c10::DeviceIndex> with_context;
std::array<std::atomic<int64_t>, kCounts> counts{};
std::atomic<int64_t> streams{1};
thread_local std::array<int64_t, kDevices> stream_of{};

using Locked = std::lock_guard<std::recursive_mutex>;

void merge(Clock& into, const Clock& from) {
  for (const auto& [stream, number] : from)
    into[stream] = std::max(into[stream], number);
}

bool is_known(const Access& access, StreamKey to) {
  return access.stream < 0 || access.stream == to || clocks[to][access.stream] >= access.number;
}

std::string named(StreamKey stream) {
  return "stream " + std::to_string(stream % kStreams) + " of cuda:" + std::to_string(stream / kStreams);
}

void report(const std::string& text) {
  if (races.size() < kMostRaces)
    races.push_back(text);
}

int64_t next_kernel(StreamKey stream) {
  merge(clocks[stream], host); // what the host knows to be done is done before what it launches
  return ++clocks[stream][stream];
}

void watch(bool on) {
  Locked locked(lock);
  watches = on;
  memories.clear();
  in_flight.clear();
  races.clear();
}

c10::List<std::string> drain_races() {
  Locked locked(lock);
  c10::List<std::string> found;
  for (const auto& one : races)
    found.push_back(one);
  races.clear();
  return found;
}

c10::List<std::string> all_contexts() {
  Locked locked(lock);
  c10::List<std::string> found;
  for (const auto& [device, by] : contexts)
    found.push_back(std::to_string(device) + " by " + by);
  return found;
}

c10::List<int64_t> all_counts() {
  c10::List<int64_t> found;
  for (const auto& one : counts)
    found.push_back(one.load());
  return found;
}

} // namespace

StreamKey key_of(c10::DeviceIndex device, int64_t stream) {
  return device * kStreams + stream;
}

StreamKey key_of(const c10::Stream& stream) {
  return key_of(stream.device_index(), stream.id());
}

int64_t current_stream(c10::DeviceIndex device) {
  return stream_of.at(device);
}

void set_current_stream(c10::DeviceIndex device, int64_t stream) {
  stream_of.at(device) = stream;
}

int64_t new_stream() {
  return streams++;
}

void on_access(const void* memory, bool writes, StreamKey stream, const std::string& kernel) {
  if (memory == nullptr)
    return;
  Locked locked(lock);
  if (!watches)
    return;
  auto& touched = memories[memory];
  const auto number = next_kernel(stream);
  auto check = [&](const Access& other, const char* did) {
    if (!is_known(other, stream))
      report(kernel + (writes ? " writes" : " reads") + " on " + named(stream) + " what " + other.kernel + did +
             named(other.stream) + ", and waits for no event behind that");
  };
  check(touched.write, " writes on ");
  if (!writes) {
    touched.reads[stream] = {stream, number, kernel};
    return;
  }
  for (const auto& [_, read] : touched.reads)
    check(read, " reads on ");
  touched.reads.clear();
  touched.write = {stream, number, kernel};
}

void on_allocation(const void* memory, StreamKey stream) {
  if (memory == nullptr)
    return;
  Locked locked(lock);
  if (!watches)
    return;
  memories[memory].home = stream;
  merge(clocks[stream], host);
  for (const auto& access : in_flight[stream])
    if (!is_known(access, stream))
      report("memory that " + named(stream) + " freed may be handed out again while " + access.kernel + " on " +
             named(access.stream) + " uses it: neither record_stream nor an event holds it back");
  in_flight[stream].clear();
}

void on_release(const void* memory) {
  Locked locked(lock);
  auto found = memories.find(memory);
  if (found == memories.end())
    return;
  const auto& freed = found->second;
  auto keep = [&](const Access& access) {
    if (freed.home >= 0 && !is_known(access, freed.home) && !freed.recorded.count(access.stream))
      in_flight[freed.home].push_back(access);
  };
  keep(freed.write);
  for (const auto& [_, read] : freed.reads)
    keep(read);
  memories.erase(found);
}

void on_record(const void* memory, StreamKey stream) {
  Locked locked(lock);
  if (watches && memory != nullptr)
    memories[memory].recorded.insert(stream);
}

Clock clock_of(StreamKey stream) {
  Locked locked(lock);
  merge(clocks[stream], host);
  return clocks[stream];
}

Clock clock_of_device(c10::DeviceIndex device) {
  Locked locked(lock);
  Clock all;
  for (const auto& [stream, clock] : clocks)
    if (stream / kStreams == device)
      merge(all, clock);
  return all;
}

void stream_learns(StreamKey stream, const Clock& clock) {
  Locked locked(lock);
  merge(clocks[stream], clock);
}

void hang(StreamKey stream) {
  Locked locked(lock);
  hung.emplace(stream, ++clocks[stream][stream]);
}

bool hangs(const Clock& clock) {
  Locked locked(lock);
  return std::any_of(hung.begin(), hung.end(), [&](const auto& one) {
    const auto known = clock.find(one.first);
    return known != clock.end() && known->second >= one.second;
  });
}

void host_learns(const Clock& clock) {
  while (hangs(clock))
    std::this_thread::sleep_for(std::chrono::seconds(1));
  std::vector<std::function<void()>> done;
  {
    Locked locked(lock);
    merge(host, clock);
    for (auto one = copies.begin(); one != copies.end();) {
      const bool is_done = host[one->stream] >= one->number;
      if (is_done)
        done.push_back(std::move(one->run));
      one = is_done ? copies.erase(one) : std::next(one);
    }
  }
  for (const auto& copy : done)
    copy();
}

bool host_knows(const Clock& clock) {
  bool any_hangs;
  {
    Locked locked(lock);
    any_hangs = !hung.empty();
  }
  if (any_hangs) {
    if (hangs(clock))
      return false;
    host_learns(clock); // with it, the copies before it are there
    return true;
  }
  Locked locked(lock);
  return std::all_of(clock.begin(), clock.end(), [](const auto& one) { return host[one.first] >= one.second; });
}

void on_copy_to_host(StreamKey stream, std::function<void()> copy) {
  Locked locked(lock);
  copies.push_back({stream, next_kernel(stream), std::move(copy)});
}

void on_context(c10::DeviceIndex device, const std::string& by) {
  Locked locked(lock);
  contexts.emplace(device, by);
  with_context.insert(device);
}

bool has_context(c10::DeviceIndex device) {
  Locked locked(lock);
  return with_context.count(device) > 0;
}

bool has_any_context() {
  Locked locked(lock);
  return !with_context.empty();
}

void count(Count what) {
  counts.at(what)++;
}

TORCH_LIBRARY_FRAGMENT(simgpu, library) {
  library.def("watch(bool on) -> ()", watch);
  library.def("races() -> str[]", drain_races);
  library.def("contexts() -> str[]", all_contexts);
  library.def("forget_contexts() -> ()", [] {
    Locked locked(lock);
    contexts.clear();
  });
  library.def("counts() -> int[]", all_counts);
  library.def("on_context(int device, str by) -> ()", [](int64_t device, std::string by) {
    on_context(static_cast<c10::DeviceIndex>(device), by);
  });
  library.def("hang(int device) -> ()", [](int64_t device) {
    const auto index = static_cast<c10::DeviceIndex>(device);
    hang(key_of(index, current_stream(index)));
  });
  library.def("has_context(int device) -> bool", [](int64_t device) {
    return has_context(static_cast<c10::DeviceIndex>(device));
  });
}

} // namespace simgpu
