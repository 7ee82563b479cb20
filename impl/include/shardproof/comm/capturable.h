// Which communicators a graph of a device can repeat.
#pragma once

#include <string>
#include <vector>

#include "shardproof/comm/comm.h"

namespace shardproof {

// A base of communicators whose calls on tensors of a device are work of the device alone, as NCCL's are. While a graph is
// captured (device/device_graph.h) such a call becomes a part of it. A replay passes no communicator: nobody checks, records or
// times what it sends.
class CapturableComm {
 public:
  virtual ~CapturableComm() = default;
  // Titles of the calls of this rank, in all groups, that nobody has waited for.
  virtual std::vector<std::string> open_calls() const = 0;
};

// A group of one rank communicates with nobody.
inline bool can_be_captured(const Comm& comm) {
  return comm.size() == 1 || dynamic_cast<const CapturableComm*>(&comm) != nullptr;
}

}  // namespace shardproof
