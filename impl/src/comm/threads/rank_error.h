// The error of one rank, as the caller of the world gets it.
#pragma once

#include <cstdint>
#include <exception>

namespace shardproof::threads {

// Throws the error with its rank in the message and with its type. A negative rank stands for all ranks: the message stays.
[[noreturn]] void rethrow_with_rank(const std::exception_ptr& error, int64_t rank, int64_t world);

}  // namespace shardproof::threads
