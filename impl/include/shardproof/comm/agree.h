// Short texts that ranks tell each other, and errors that all of them throw together: for work that each rank does by itself
// and that may fail on one of them, such as reading a file.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "shardproof/comm/comm.h"

namespace shardproof {

// Every rank's text, by rank. Collective.
std::vector<std::string> gather_texts(Comm& comm, const std::string& mine);

// Throws Error on every rank when `error` is not empty on any: the first rank's, with its number. Collective.
void agree(Comm& comm, const std::string& error);

// What `body` threw, "" when nothing. BrokenInvariant is not caught.
std::string error_of(const std::function<void()>& body);

// Runs the body, which does not communicate, and throws on every rank when it threw on any. Collective.
inline void agree_on(Comm& comm, const std::function<void()>& body) { agree(comm, error_of(body)); }

}  // namespace shardproof
