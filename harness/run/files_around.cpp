#include "harness/run/files_around.h"

#include <atomic>
#include <cerrno>
#include <memory>

#include "harness/case/random.h"

namespace harness {

shardproof::checkpoint::FileSystem& hasty_files() {
  static FilesAround files([](FileCall& call, const auto& make) { return call.kind == CallKind::flush ? 0 : make(); });
  return files;
}

DiskHabits DiskHabits::drawn(uint64_t seed) {
  Chooser draw(Draws(seed, "habits"));
  DiskHabits habits{.folders_flush = draw.one_of<int>({0, EINVAL, EOPNOTSUPP, ENOSYS}), .refuses_direct = draw.chance(0.5)};
  for (double* const chance : {&habits.interrupts, &habits.cuts, &habits.forgets}) *chance = draw.one_of<double>({0, 0.1, 0.5});
  return habits;
}

FilesAround::Around with(const DiskHabits& habits, uint64_t seed) {
  struct State {
    std::atomic<int64_t> calls{0};
    std::atomic<bool> interrupted{false};
  };
  return [=, draws = Draws(seed, "disk"), state = std::make_shared<State>()](FileCall& call, const auto& make) -> ssize_t {
    const Draws drawn = draws.at(state->calls++);
    if (call.kind == CallKind::direct && habits.refuses_direct) return -EINVAL;
    if (call.kind == CallKind::direct || call.kind == CallKind::close) return make();
    if (drawn.unit(0) < habits.interrupts && !state->interrupted.exchange(true)) return -EINTR;
    state->interrupted = false;
    if (call.kind == CallKind::flush && call.of_folder && habits.folders_flush != 0) return -habits.folders_flush;
    if (call.bytes > 1 && drawn.unit(1) < habits.cuts) call.bytes /= 2;
    const ssize_t done = make();
    if (done < 0 || drawn.unit(1) >= habits.forgets) return done;
    const bool gone = call.kind == CallKind::rename || call.kind == CallKind::unlink || call.kind == CallKind::rmdir;
    return gone ? -ENOENT : done;
  };
}

}  // namespace harness
