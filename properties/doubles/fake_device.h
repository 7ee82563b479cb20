// A device that is as late as it may be: streams run only when somebody synchronizes with them, and then only what events make
// them wait for. What is not ordered by an event therefore has not happened yet. LibTorch's operators run on it: they read when
// their stream gets there, and what is freed is overwritten when the stream gets there that it was allocated on, unless the
// allocator was told of others (recordDataPtrOnStream). It refuses what a GPU refuses: the host's hands on its memory (SIGSEGV,
// with a message), tensors of the host beside its own, kernels on memory of another device than the current one, and waits for
// events of a capture outside of it.
#pragma once

#include <ATen/ATen.h>

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "shardproof/comm/threads/schedule_policy.h"

namespace fake_device {

// Of LibTorch's PrivateUse1. Gives it memory, operators, streams and events, and the CPU's arithmetic; once a process.
void install();
c10::Device device();
// There are two, each with memory and streams of its own. `device` is the first, and current at first.
c10::Device second_device();
inline at::TensorOptions options(at::ScalarType dtype) { return at::TensorOptions(dtype).device(device()); }

// Where work that runs on the device, and a test that has synchronized, finds the memory; null for null.
void* on_host(const void* device_memory);
template <class T>
T* on_host(const at::Tensor& tensor) {
  return static_cast<T*>(on_host(tensor.const_data_ptr()));
}

// Whether queueing a collective's sums takes so long that other ranks can look meanwhile; at first it does not.
void hesitate(bool on);

// Runs the program once for every way in which the device may take the streams' work. In each call that synchronizes, and with
// `between_calls` after each that queues something, it may have run anything that no event keeps back; every order of the work
// is tried either way. The program says whether what it saw is right. It does the same each time, from one thread or from ranks
// that run one at a time, and has a few steps only.
struct Orders {
  int64_t runs = 0, failed = 0;
  int64_t distinct = 0;  // orders of the work itself
};
enum class When { between_calls, at_synchronization };
Orders every_order(const std::function<bool()>& program, When when = When::between_calls, int64_t most = 200000);

// A policy decides when the streams run, in each call that queues something or synchronizes, as it decides for rank-threads
// that have the same policy. Choices are the host, as rank -1, where it may go on, and streams that nothing keeps from running,
// as threads of rank -1. Null: streams are as late as they may be.
void schedule_by(std::shared_ptr<shardproof::SchedulePolicy> policy);

// How many bytes operators have copied from the host to the device so far.
int64_t bytes_from_host();

// How often the host has waited for the device so far, where it would wait for a GPU too: by what it waited for.
std::map<std::string, int64_t> host_waits();

// The most bytes of the device that tensors of all threads have had at a time, since the last call that forgets.
int64_t most_bytes_in_use(bool forget);

// How many bytes of page-locked memory of the host were asked for so far.
int64_t bytes_page_locked();

// Appends to the calling thread's current stream. `what` is its name among the launches of a graph.
void queue(std::function<void()> work, const std::string& what = "kernel");
// Runs what the calling thread's current stream has, and what that waits for.
void synchronize();

// A graph (shardproof/device/device_graph.h) that is captured here keeps addresses and numbers, as CUDA's does: replays read
// and write where the capture did, and nothing of what was captured happens by the capture itself. A host that waits inside of
// a capture is an error that names what it waits for. These are the launches of the last capture, in the order of the host,
// each with the addresses that it was given; those of the graph's own memory count from where that begins.
std::vector<std::string> last_launches();

}  // namespace fake_device
