// Who of the job's processes is still there: each holds a connection to rank 0 and says every moment what it waits for. A
// connection that ends is a dead process, one that falls silent a stopped one, and one that waits too long has a culprit, which
// rank 0 finds by following who waits for whom. Who saves to a disk is none, however long it takes. What ends the world is told
// to all. No Torch, no MPI.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

namespace shardproof {

struct WatchStatus {
  bool waiting = false;
  bool saving = false;  // instead: to a disk, which may take its time
  double waited_s = 0;
  std::vector<int64_t> missing = {};  // ranks that it waits for
  std::string text = {};              // the call that it waits in, or made last
};

struct WatchOptions {
  int64_t rank = 0, world = 1;
  bool one_host = false;  // then nobody else can connect
  double timeout_s = 300;
  std::function<WatchStatus()> status;             // of this process
  std::function<void(const std::string&)> on_end;  // once, on the watch's thread
};

class ProcessWatch {
 public:
  explicit ProcessWatch(WatchOptions options);
  ~ProcessWatch();  // leaves without a word
  ProcessWatch(const ProcessWatch&) = delete;
  ProcessWatch& operator=(const ProcessWatch&) = delete;

  // Rank 0: where the others can reach it, "host:port host:port ...".
  std::string listen();
  // Everybody, with what rank 0's listen returned; rank 0 returns when all are there.
  void connect(const std::string& addresses);
  // Says goodbye: what happens to this connection from now on is no failure.
  void leave();

  // The text that ended the world; "" as long as it goes on.
  std::string ended() const;
  // Ends the world for all, from this process.
  void end(const std::string& why);

 private:
  struct Peer {
    int socket = -1;
    bool left = false;
    std::string unread;
    WatchStatus status;
    std::chrono::steady_clock::time_point heard;
  };
  using Clock = std::chrono::steady_clock;

  void run();
  void look_around();
  void read_from(int64_t rank);
  void take_line(int64_t rank, const std::string& line);
  void say_beat();
  void say(Peer& peer, const std::string& line);
  void tell_all_end(const std::string& why);
  void check_hub();
  void check_silence();
  void check_waits();
  // For several beats: it may be stopped.
  bool is_silent(int64_t rank) const;
  std::string culprit_of(int64_t waiting_rank) const;  // "" where one saves
  void end_waits_for(int64_t waiting_rank);
  std::string name_of(int64_t rank) const;
  void close_all();

  const WatchOptions options_;
  const std::chrono::milliseconds beat_;
  int listener_ = -1;
  std::map<int64_t, Peer> peers_;  // rank 0: all others; the others: rank 0
  Clock::time_point next_beat_, looked_;
  std::atomic<bool> stop_{false}, leaving_{false};
  mutable std::mutex mutex_;  // ended_, asked_
  std::string ended_, asked_;
  bool told_ = false;
  std::thread thread_;
};

}  // namespace shardproof
