// Worlds for properties of communication, of the backend that they are linked with: rank-threads (comm_worlds_threads.cpp), or
// the processes of an MPI job (comm_worlds_mpi.cpp).
#pragma once

#include <ATen/ATen.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "shardproof/comm/comm.h"
#include "shardproof/comm/threads/threads.h"

namespace worlds {

using shardproof::Comm;
using Body = std::function<void(std::shared_ptr<Comm>)>;

// Ranks of the largest world.
int64_t ranks_max();
// Whether all of them are on one host.
bool one_host();
// Whether this backend finishes sums (Finish) with these options.
bool finishes_sums(const shardproof::ThreadsOptions& options);
// Runs the body on every rank of a world. Throws what ended it.
void run(int64_t world, const Body& body, const shardproof::ThreadsOptions& options = {});
// A text that some process found, "" when none did; the same in every process.
std::string agree(const std::string& found);

// Every schedule with every completion, under several seeds.
std::vector<shardproof::ThreadsOptions> all_options();
std::string name(const shardproof::ThreadsOptions& options);

// Values of every sign and size, different on every rank; small integers for integer dtypes.
at::Tensor values(int64_t numel, at::ScalarType dtype, int64_t rank, int64_t salt);

// The message of the Error that ends the world; a test failure when it ends well.
std::string error_of(int64_t world, const Body& body, const shardproof::ThreadsOptions& options = {});

}  // namespace worlds
