// Checks that all ranks run the same: the same program with the same command line, the same options of the same model.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "shardproof/comm/comm.h"

namespace shardproof {

// Of facts, each a name and a value, e.g. {"mesh", "dp_shard=4"}.
using Facts = std::vector<std::pair<std::string, std::string>>;

// When ranks have other facts than rank 0, every rank throws an Error that names these ranks, and the first
// such fact with its value on two of them. `where` and `advice` begin and end the message. A maximum of two numbers where all
// are the same. Collective.
void require_same(Comm& comm, const Facts& facts, const std::string& where = "launch",
                  const std::string& advice = "Start all ranks alike");
// The same where every rank knows already that facts differ. Collective.
[[noreturn]] void throw_difference(Comm& comm, const Facts& facts, const std::string& where, const std::string& advice);
// The same in two steps: a maximum over ranks of the first's result, which the second looks at.
at::Tensor hashes_of(const Facts& facts);
bool differ(const at::Tensor& hashes);
// What this process computes with on the CPU: other vector instructions or another PyTorch round sums differently.
Facts torch_facts();
// A hash of the program's file and of this library's file. It tells builds apart.
std::string program_hash();

}  // namespace shardproof
