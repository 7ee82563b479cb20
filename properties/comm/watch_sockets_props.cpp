// The connections by which processes watch each other: who is let in, and what is said of who does not come.
#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <chrono>
#include <map>
#include <thread>

#include "properties/kit/expect_error.h"
#include "internal/comm/watch_sockets.h"

using namespace shardproof;

namespace {

WatchDeadline in_seconds(int64_t seconds) {
  return std::chrono::steady_clock::now() + std::chrono::seconds(seconds);
}

std::string first_address(const std::string& addresses) {
  const size_t begin = addresses.find(' ') + 1;
  return addresses.substr(begin, addresses.find(' ', begin) - begin);
}

// A connection on which nothing was said yet.
int connection_to(const std::string& address) {
  const size_t colon = address.find(':');
  sockaddr_in to{};
  to.sin_family = AF_INET;
  to.sin_port = htons(static_cast<uint16_t>(std::stoi(address.substr(colon + 1))));
  ::inet_pton(AF_INET, address.substr(0, colon).c_str(), &to.sin_addr);
  const int socket = ::socket(AF_INET, SOCK_STREAM, 0);
  EXPECT_EQ(::connect(socket, reinterpret_cast<sockaddr*>(&to), sizeof to), 0);
  return socket;
}

// Connects as what is no rank of the job, and returns how many bytes it is answered.
ssize_t answer_to_a_stranger(const std::string& address) {
  const int socket = connection_to(address);
  std::array<char, 16> bytes{};
  EXPECT_EQ(::send(socket, bytes.data(), bytes.size(), MSG_NOSIGNAL), 16);
  const ssize_t answered = ::recv(socket, bytes.data(), bytes.size(), 0);
  ::close(socket);
  return answered;
}

}  // namespace

TEST(WatchSockets, ranks_of_the_job_are_let_in_and_a_stranger_is_turned_away_without_a_word) {
  const auto [listener, addresses] = watch_listen(3, /*one_host=*/true);
  std::map<int64_t, int> own;
  std::thread others([&, to = addresses] {
    EXPECT_EQ(answer_to_a_stranger(first_address(to)), 0);
    for (const int64_t rank : {2, 1}) own[rank] = watch_connect(to, rank, in_seconds(60));
  });
  const auto accepted = watch_accept(listener, 2, in_seconds(60));
  others.join();
  ASSERT_EQ(accepted.size(), 2U);
  for (const auto& [rank, socket] : accepted) {
    ASSERT_TRUE(own.contains(rank)) << rank;
    const auto sent = static_cast<char>('a' + rank);
    char received = 0;
    EXPECT_EQ(::send(socket, &sent, 1, MSG_NOSIGNAL), 1);
    EXPECT_EQ(::recv(own[rank], &received, 1, 0), 1);
    EXPECT_EQ(received, sent) << "rank " << rank << " is at the other end";
    ::close(socket);
    ::close(own[rank]);
  }
  ::close(listener);
}

TEST(WatchSockets, a_rank_that_gave_up_before_it_was_answered_is_let_in_by_its_next_connection) {
  const auto [listener, addresses] = watch_listen(2, /*one_host=*/true);
  const int given_up = connection_to(first_address(addresses));
  const std::array<uint64_t, 2> hello{std::stoull(addresses), 1};
  EXPECT_EQ(::send(given_up, hello.data(), sizeof hello, MSG_NOSIGNAL), 16);
  ::close(given_up);
  int own = -1;
  std::thread rank_1([&, to = addresses] { own = watch_connect(to, 1, in_seconds(60)); });
  const auto accepted = watch_accept(listener, 1, in_seconds(60));
  rank_1.join();
  ASSERT_EQ(accepted.size(), 1U);
  char received = 0;
  EXPECT_EQ(::send(accepted[0].second, "x", 1, MSG_NOSIGNAL), 1);
  EXPECT_EQ(::recv(own, &received, 1, 0), 1);
  EXPECT_EQ(received, 'x');
  for (const int socket : {accepted[0].second, own, listener}) ::close(socket);
}

TEST(WatchSockets, a_stranger_that_says_half_a_word_holds_nobody_up_for_good) {
  const auto [listener, addresses] = watch_listen(2, /*one_host=*/true);
  const int stranger = connection_to(first_address(addresses));
  EXPECT_EQ(::send(stranger, "who", 3, MSG_NOSIGNAL), 3);
  int own = -1;
  std::thread rank_1([&, to = addresses] { own = watch_connect(to, 1, in_seconds(60)); });
  EXPECT_EQ(watch_accept(listener, 1, in_seconds(60)).size(), 1U);
  rank_1.join();
  for (const int socket : {stranger, own, listener}) ::close(socket);
}

TEST(WatchSockets, ranks_connect_by_ipv6_where_a_host_has_no_other_address) {
  const auto [listener, addresses] = watch_listen(2, /*one_host=*/false);
  const int probe = ::socket(AF_INET6, SOCK_STREAM, 0);
  sockaddr_in6 loopback{.sin6_family = AF_INET6, .sin6_addr = IN6ADDR_LOOPBACK_INIT};
  if (probe < 0 || ::bind(probe, reinterpret_cast<sockaddr*>(&loopback), sizeof loopback) != 0)
    GTEST_SKIP() << "this machine has no IPv6";
  const size_t six = addresses.find(" ::1:");
  ASSERT_NE(six, std::string::npos) << addresses;
  const std::string only = addresses.substr(0, addresses.find(' ')) + addresses.substr(six, addresses.find(' ', six + 1) - six);
  int own = -1;
  std::thread rank_1([&] { own = watch_connect(only, 1, in_seconds(60)); });
  const auto accepted = watch_accept(listener, 1, in_seconds(60));
  rank_1.join();
  ASSERT_EQ(accepted.size(), 1U);
  sockaddr_in6 peer{};
  socklen_t length = sizeof peer;
  ASSERT_EQ(::getpeername(own, reinterpret_cast<sockaddr*>(&peer), &length), 0);
  EXPECT_TRUE(peer.sin6_family == AF_INET6 && IN6_IS_ADDR_LOOPBACK(&peer.sin6_addr));
  for (const int socket : {accepted[0].second, own, listener, probe}) ::close(socket);
}

TEST(WatchSockets, rank_0_says_how_many_ranks_did_not_come) {
  const auto [listener, addresses] = watch_listen(4, /*one_host=*/true);
  expect_error([listener = listener] { watch_accept(listener, 3, in_seconds(0)); }, {"[watch] 3 of 3 ranks did not connect"});
  ::close(listener);
}

TEST(WatchSockets, a_rank_that_nobody_answers_says_where_it_looked) {
  const auto [listener, addresses] = watch_listen(2, /*one_host=*/true);
  ::close(listener);
  expect_error([to = addresses] { watch_connect(to, 1, in_seconds(0)); },
               {"[watch] rank 1 cannot reach rank 0 at any of " + first_address(addresses), "TCP"});
}
