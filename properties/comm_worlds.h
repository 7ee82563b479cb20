// Worlds of rank-threads for properties of communication.
#pragma once

#include <ATen/ATen.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "shardproof/comm.h"
#include "shardproof/threads.h"

namespace worlds {

using shardproof::Comm;
using Body = std::function<void(std::shared_ptr<Comm>)>;

// Every schedule with every completion, under several seeds.
std::vector<shardproof::ThreadsOptions> all_options();
std::string name(const shardproof::ThreadsOptions& options);

// Values of every sign and size, different on every rank; small integers for integer dtypes.
at::Tensor values(int64_t numel, at::ScalarType dtype, int64_t rank, int64_t salt);

// Equal in every byte.
bool same_bytes(const at::Tensor& a, const at::Tensor& b);

// The message of the Error that ends the world; a test failure when it ends well.
std::string error_of(int64_t world, const Body& body, const shardproof::ThreadsOptions& options = {});

}  // namespace worlds
