// The parts of the fake device: its memory and its operators.
#pragma once

#include <c10/core/Allocator.h>
#include <c10/core/Stream.h>

#include <string>

namespace fake_device {

// As a caching allocator's: what is freed is used again only by the stream that it was allocated on, and new memory is full of
// NaN, from when the stream gets there.
c10::Allocator& memory();
c10::StreamId current_stream();

// Adds one to what `host_waits` says.
void count_wait(const std::string& what);

// Every operator that has a kernel for the CPU.
void register_operators();

}  // namespace fake_device
