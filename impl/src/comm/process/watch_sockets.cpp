#include "internal/comm/watch_sockets.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <fmt/format.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <random>
#include <set>
#include <sstream>

#include "shardproof/base/check.h"

namespace shardproof {
namespace {

constexpr int kConnectMs = 2000;

// A job's own word, so that whatever else connects is turned away.
uint64_t job_word = 0;

// What a rank says first. Rank 0 answers with ~word, and the rank repeats the word: only then are the two connected. A rank
// that was not answered in time gives its connection up and makes another, and rank 0 finds the old one first.
struct Hello {
  uint64_t word = 0;
  int64_t rank = 0;
};

int milliseconds_left(WatchDeadline deadline) {
  const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(deadline - std::chrono::steady_clock::now()).count();
  return static_cast<int>(std::max<int64_t>(0, std::min<int64_t>(left, 1 << 30)));
}

bool is_ready(int socket, short events, int timeout_ms) {
  pollfd fd{.fd = socket, .events = events, .revents = 0};
  return ::poll(&fd, 1, timeout_ms) == 1;
}

template <class Message>
bool tell(int socket, const Message& message) {
  return ::send(socket, &message, sizeof message, MSG_NOSIGNAL) == sizeof message;
}

// Whether all of it came before the deadline.
template <class Message>
bool hear(int socket, Message& message, WatchDeadline deadline) {
  auto* const bytes = reinterpret_cast<char*>(&message);
  for (size_t heard = 0; heard < sizeof message;) {
    if (!is_ready(socket, POLLIN, milliseconds_left(deadline))) return false;
    const ssize_t got = ::recv(socket, bytes + heard, sizeof message - heard, 0);
    if (got <= 0) return false;
    heard += static_cast<size_t>(got);
  }
  return true;
}

WatchDeadline soon(WatchDeadline deadline) {
  return std::min(deadline, std::chrono::steady_clock::now() + std::chrono::milliseconds(kConnectMs));
}

// Loopback last: another host would reach itself by it. Addresses of a link alone are none without the name of an interface.
std::vector<std::string> own_addresses() {
  std::vector<std::string> found, loopback;
  ifaddrs* all = nullptr;
  if (::getifaddrs(&all) != 0) return {"127.0.0.1"};
  for (const ifaddrs* each = all; each; each = each->ifa_next) {
    if (!each->ifa_addr || !(each->ifa_flags & IFF_UP)) continue;
    const auto family = each->ifa_addr->sa_family;
    const auto& six = *reinterpret_cast<const sockaddr_in6*>(each->ifa_addr);
    if (family != AF_INET && (family != AF_INET6 || IN6_IS_ADDR_LINKLOCAL(&six.sin6_addr))) continue;
    char text[INET6_ADDRSTRLEN] = {};
    ::getnameinfo(each->ifa_addr, family == AF_INET ? sizeof(sockaddr_in) : sizeof six, text, sizeof text, nullptr, 0,
                  NI_NUMERICHOST);
    (each->ifa_flags & IFF_LOOPBACK ? loopback : found).emplace_back(text);
  }
  ::freeifaddrs(all);
  found.insert(found.end(), loopback.begin(), loopback.end());
  return found.empty() ? std::vector<std::string>{"127.0.0.1"} : found;
}

void send_at_once(int socket) {
  const int on = 1;
  ::setsockopt(socket, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
}

// A connection that rank 0 has answered, or -1.
int try_connect(const std::string& host, const std::string& port, const Hello& hello, WatchDeadline deadline) {
  addrinfo *to = nullptr, numbers{};
  numbers.ai_flags = AI_NUMERICHOST | AI_NUMERICSERV;
  if (::getaddrinfo(host.c_str(), port.c_str(), &numbers, &to) != 0) return -1;
  const int socket = ::socket(to->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  const bool begun = socket >= 0 && (::connect(socket, to->ai_addr, to->ai_addrlen) == 0 || errno == EINPROGRESS);
  ::freeaddrinfo(to);
  uint64_t answer = 0;
  if (begun && is_ready(socket, POLLOUT, milliseconds_left(deadline)) && tell(socket, hello) &&
      hear(socket, answer, deadline) && answer == ~hello.word && tell(socket, hello.word)) {
    send_at_once(socket);
    return socket;
  }
  if (socket >= 0) ::close(socket);
  return -1;
}

}  // namespace

std::pair<int, std::string> watch_listen(int64_t world, bool one_host) {
  // One socket for both families, where the kernel has IPv6.
  const int six = one_host ? -1 : ::socket(AF_INET6, SOCK_STREAM | SOCK_CLOEXEC, 0), off = 0;
  const int socket = six >= 0 ? six : ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in6 any{.sin6_family = AF_INET6};
  sockaddr_in four{.sin_family = AF_INET};
  four.sin_addr.s_addr = htonl(one_host ? INADDR_LOOPBACK : INADDR_ANY);
  auto* const address = six >= 0 ? reinterpret_cast<sockaddr*>(&any) : reinterpret_cast<sockaddr*>(&four);
  socklen_t length = six >= 0 ? sizeof any : sizeof four;
  if (six >= 0) ::setsockopt(six, IPPROTO_IPV6, IPV6_V6ONLY, &off, sizeof off);
  const bool bound = socket >= 0 && ::bind(socket, address, length) == 0 && ::listen(socket, static_cast<int>(world)) == 0 &&
                     ::getsockname(socket, address, &length) == 0;
  SHARD_REQUIRE(bound, "watch", "rank 0 cannot listen for the other ranks: {}", std::strerror(errno));
  std::random_device random;
  job_word = (static_cast<uint64_t>(random()) << 32) | random();
  std::string text = fmt::format("{}", job_word);
  const std::vector<std::string> hosts = one_host ? std::vector<std::string>{"127.0.0.1"} : own_addresses();
  for (const std::string& host : hosts) text += fmt::format(" {}:{}", host, ntohs(six >= 0 ? any.sin6_port : four.sin_port));
  return {socket, text};
}

std::vector<std::pair<int64_t, int>> watch_accept(int listener, int64_t connections, WatchDeadline deadline) {
  std::vector<std::pair<int64_t, int>> accepted;
  std::set<int64_t> ranks;
  while (static_cast<int64_t>(accepted.size()) < connections) {
    SHARD_REQUIRE(is_ready(listener, POLLIN, milliseconds_left(deadline)), "watch",
                  "{} of {} ranks did not connect to rank 0 in time; is TCP between the hosts blocked?",
                  connections - static_cast<int64_t>(accepted.size()), connections);
    const int socket = ::accept4(listener, nullptr, nullptr, SOCK_CLOEXEC);
    Hello hello;
    uint64_t again = 0;
    const bool ours = socket >= 0 && hear(socket, hello, soon(deadline)) && hello.word == job_word && tell(socket, ~job_word) &&
                      hear(socket, again, deadline) && again == job_word && ranks.insert(hello.rank).second;
    if (ours) {
      send_at_once(socket);
      accepted.emplace_back(hello.rank, socket);
    } else if (socket >= 0) {
      ::close(socket);
    }
  }
  return accepted;
}

int watch_connect(const std::string& addresses, int64_t rank, WatchDeadline deadline) {
  std::istringstream words(addresses);
  Hello hello{.rank = rank};
  words >> hello.word;
  std::vector<std::string> all;
  for (std::string each; words >> each;) all.push_back(each);
  do {
    for (const std::string& each : all) {
      const size_t colon = each.rfind(':');
      const int socket = try_connect(each.substr(0, colon), each.substr(colon + 1), hello, soon(deadline));
      if (socket >= 0) return socket;
    }
  } while (milliseconds_left(deadline) > 0);
  throw Error(fmt::format("[watch] rank {} cannot reach rank 0 at any of {}; is TCP between the hosts blocked?", rank,
                          addresses.substr(addresses.find(' ') + 1)));
}

}  // namespace shardproof
