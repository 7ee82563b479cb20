// Errors that all ranks throw together. They are for work that each rank does by itself and that may fail on one of them, such
// as reading a file.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "shardproof/comm/comm.h"

namespace shardproof {

// Returns every rank's text, in the order of ranks. Collective.
std::vector<std::string> gather_texts(Comm& comm, const std::string& mine);

// Returns the root's text, on every rank; what the others give is not used. Collective.
std::string broadcast_text(Comm& comm, std::string text, int64_t root);

// Throws Error on every rank when `error` is not empty on some rank. The message is that of the lowest such rank and names it.
// Collective.
void agree(Comm& comm, const std::string& error);

// Throws the first error, with its rank's number, unless all are empty. Errors by rank.
void throw_first(const std::vector<std::string>& errors);

// What `body` returns on rank 0, which alone runs it, on every rank; or the error that it throws there, on every rank as well.
// One collective: a text may have 8,191 bytes, and of a longer error those are left.
std::string from_rank_0(Comm& comm, const std::function<std::string()>& body);

// Runs the body and returns the message of the exception that it threw, or "" when it threw none. It does not catch
// BrokenInvariant.
std::string error_of(const std::function<void()>& body);

// Runs the body on every rank, and throws Error on every rank when the body threw on some rank. The body must not communicate.
// Collective.
inline void agree_on(Comm& comm, const std::function<void()>& body) { agree(comm, error_of(body)); }

}  // namespace shardproof
