// A device that is as late as it may be: streams run only when somebody synchronizes with them, and then only what events make
// them wait for. Memory is the CPU's. What is not ordered by an event therefore has not happened yet.
#pragma once

#include <ATen/ATen.h>

#include <functional>

namespace fake_device {

// Of LibTorch's PrivateUse1. Gives it streams and events, and kernel twins as arithmetic; once a process.
void install();
c10::Device device();

// 1-D memory of `numel` elements; LibTorch has no operators for it.
at::Tensor allocate(int64_t numel, at::ScalarType dtype);

// Appends to the calling thread's current stream.
void queue(std::function<void()> work);
// Runs what the calling thread's current stream has, and what that waits for.
void synchronize();

}  // namespace fake_device
