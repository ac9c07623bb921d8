// Which work of a simulated GPU comes before which other.
//
// A stream runs its kernels in order. Work of two streams has an order only if an event, or the host, gives it one. Each
// stream, each event and the host has a vector clock: for each stream, the number of its last kernel that is known to
// be done. A kernel that touches memory which another stream wrote, or writes memory which another stream read, without
// having that kernel in its clock, is a race: on a GPU it reads half of the numbers now and then.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <cstdint>
#include <functional>
#include <map>
#include <set>
#include <string>
#include <vector>

namespace simgpu {

constexpr int kDevices = 8;

using StreamKey = int64_t; // a device and one of its streams
using Clock = std::map<StreamKey, int64_t>;

StreamKey key_of(c10::DeviceIndex device, int64_t stream);
StreamKey key_of(const c10::Stream& stream);

// The stream on which this thread's kernels of a device run.
int64_t current_stream(c10::DeviceIndex device);
void set_current_stream(c10::DeviceIndex device, int64_t stream);
int64_t new_stream();

// A kernel on a stream reads, or writes, memory; `memory` is the start of a storage.
void on_access(const void* memory, bool writes, StreamKey stream, const std::string& kernel);

// Memory was allocated on a stream, or freed to the one that allocated it, which may hand it out again at once.
void on_allocation(const void* memory, StreamKey stream);
void on_release(const void* memory);
// The allocator will not hand the memory out before this stream's work so far is done.
void on_record(const void* memory, StreamKey stream);

Clock clock_of(StreamKey stream);                  // what an event knows that is recorded now
void stream_learns(StreamKey stream, const Clock&); // a stream waits for an event
Clock clock_of_device(c10::DeviceIndex device);     // of all streams of a device
void host_learns(const Clock&);                     // the host has waited for an event
bool host_knows(const Clock&);                      // whether it has waited for that, or for something behind it

// A kernel that never ends: what the stream is given from now on, and all that waits for it, never runs. From then on
// an event of any other work is done as soon as it is recorded: only what hangs is told from the rest.
void hang(StreamKey stream);
bool hangs(const Clock&);

// A copy to pinned memory of the host, to be done when the host has seen an event behind it.
void on_copy_to_host(StreamKey stream, std::function<void()> copy);

// A call that gives this process a context on a GPU: some 0.5 GB of its memory.
void on_context(c10::DeviceIndex device, const std::string& by);
bool has_context(c10::DeviceIndex device);
bool has_any_context();

enum Count { kKernels, kCopies, kHostWaits, kCounts };
void count(Count what);

} // namespace simgpu
