#include "checkpoint/run_owner.h"

#include <unistd.h>

#include <algorithm>
#include <ctime>
#include <filesystem>
#include <fstream>
#include <map>
#include <mutex>
#include <sstream>

#include "internal/base/disk_work.h"
#include "checkpoint/format/cause.h"
#include "shardproof/base/check.h"
#include "shardproof/checkpoint/format/durable.h"
#include "shardproof/comm/agree.h"

namespace shardproof::checkpoint {
namespace {

constexpr uint64_t kFactsBytesMax = 1 << 16;

// What a mark says, a line "NAME VALUE" each.
using Facts = std::map<std::string, std::string>;

std::string mark_of(const std::string& run) {
  return run + "/.step_owner";
}
std::string file_of(int64_t rank) {
  return fmt::format("/rank_{}", rank);
}

std::string first_line(const std::string& path) {
  std::string line;
  std::getline(std::ifstream(path), line);
  return line;
}

// When the process of this number began, by the clock of the machine's start; "" when there is none, or it is dead.
std::string began(const std::string& process) {
  const std::string text = first_line("/proc/" + process + "/stat");
  const size_t name_end = text.rfind(')');
  if (name_end == std::string::npos) return "";
  std::istringstream fields(text.substr(name_end + 1));
  std::string field;
  for (int number = 3; number <= 22 && fields >> field; ++number)
    if (number == 3 && (field == "Z" || field == "X")) return "";
  return field;
}

Facts of_this_process() {
  std::error_code unknown;
  const auto variable = [](const char* name) {
    const char* const value = std::getenv(name);
    return std::string(value ? value : "");
  };
  return {{"host", host_name()},
          {"machine", first_line("/etc/machine-id")},
          {"boot", first_line("/proc/sys/kernel/random/boot_id")},
          {"processes", std::filesystem::read_symlink("/proc/self/ns/pid", unknown).string()},  // a container has its own
          {"process", std::to_string(::getpid())},
          {"began", began("self")},
          {"job", variable("SLURM_JOB_ID")},
          {"restarts", variable("SLURM_RESTART_COUNT")}};
}

std::string text_of(const Facts& facts) {
  std::string text;
  for (const auto& [name, value] : facts) text += fmt::format("{} {}\n", name, value);
  return text;
}

// Empty: nobody's. A folder without a readable file is somebody's.
Facts read_mark(FileSystem& files, const std::string& mark) {
  if (!look_at(files, mark, Links::not_followed)) return {};
  Facts facts{{"id", ""}};
  std::string text;
  const std::string error = error_of([&] { text = read_file(files, mark + file_of(0), kFactsBytesMax); });
  if (!error.empty() && !look_at(files, mark, Links::not_followed)) return {};  // given back meanwhile
  if (!error.empty() && exists(files, mark + file_of(0))) throw Error(error);
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);)
    if (const size_t space = line.find(' '); space != std::string::npos) facts[line.substr(0, space)] = line.substr(space + 1);
  return facts;
}

// Whether the owner's process no longer lives, by what cannot be otherwise. Clocks, and how long nothing was heard, say
// nothing.
bool is_gone(const Facts& owner) {
  const Facts here = of_this_process();
  const auto told = [&](const char* name) { return owner.contains(name) ? owner.at(name) : ""; };
  const auto same = [&](const char* name) { return !told(name).empty() && told(name) == here.at(name); };
  if (same("boot") && same("processes"))
    return began(told("process")) != told("began") || same("process");  // of this process, and nobody has it any more
  if (same("host") && same("machine") && !told("boot").empty() && !same("boot")) return true;  // the machine was started anew
  return same("job") && std::atoll(told("restarts").c_str()) < std::atoll(here.at("restarts").c_str());
}

[[noreturn]] void refuse(const std::string& run, const Facts& owner) {
  const auto told = [&](const char* name) { return owner.contains(name) ? owner.at(name) : "unknown"; };
  SHARD_REQUIRE(!owner.empty(), "checkpoint",
                "another run has taken {} from this one, on {}, and given it back. This one saves nothing there: begin it anew",
                run, host_name());
  throw Error(message(
      "[checkpoint] another run saves in {}: process {} on {}, since {}. This one, on {}, saves nothing there. Wait for the "
      "other, end it, or choose another folder. If you know that it is gone, remove its mark: rm -r {}",
      run, told("process"), told("host"), told("since"), host_name(), mark_of(run)));
}

// Those of this process, by id.
struct Held {
  std::mutex mutex;
  std::map<std::string, std::weak_ptr<RunOwner>> owners;
};
Held& held() {
  static Held& held = *new Held;  // for owners that live as long as the process
  return held;
}

std::string now() {
  const std::time_t now = std::time(nullptr);
  std::tm parts{};
  char text[32] = "";
  std::strftime(text, sizeof text, "%Y-%m-%d %H:%M:%S UTC", ::gmtime_r(&now, &parts));
  return text;
}

}  // namespace

RunOwner::RunOwner(FileSystem& files, std::string run, std::string id)
    : files_(files), run_(std::move(run)), id_(std::move(id)), process_(::getpid()) {}

RunOwner::~RunOwner() {
  if (::getpid() != process_) return;  // of the process that this one was forked from
  {
    const std::lock_guard lock(held().mutex);
    held().owners.erase(id_);
  }
  clean_if_possible([&] {
    if (read_mark(files_, mark_of(run_))["id"] == id_) remove_folder(files_, mark_of(run_));
  });
}

void RunOwner::require() const {
  if (const Facts owner = read_mark(files_, mark_of(run_)); !owner.contains("id") || owner.at("id") != id_) refuse(run_, owner);
}

// The owner that this process has already. Null when the folder is free, which it may have become here.
std::shared_ptr<RunOwner> RunOwner::held_or_free(FileSystem& files, const std::string& run) {
  const std::string mark = mark_of(run);
  const Facts owner = read_mark(files, mark);
  if (owner.empty()) return nullptr;
  {
    const std::lock_guard lock(held().mutex);
    const auto found = held().owners.find(owner.at("id"));
    if (auto known = found == held().owners.end() ? nullptr : found->second.lock()) return known;
  }
  if (!is_gone(owner)) refuse(run, owner);
  clean_if_possible([&] { remove_folder(files, mark); });
  return nullptr;
}

std::shared_ptr<RunOwner> RunOwner::take(Comm& world, FileSystem& files, const std::string& run) {
  const DiskWork saving;
  std::shared_ptr<RunOwner> owner;
  std::unique_ptr<StagedFolder> staged;
  // A run that begins at the same time takes the mark, and removes what this one has staged.
  const auto refuse_if_taken = [&] {
    const Facts other = read_mark(files, mark_of(run));
    const bool is_own = owner && other.contains("id") && other.at("id") == owner->id_;
    if (!is_own && (!other.empty() || (staged && !exists(files, staged->path())))) refuse(run, other);
    return std::string();
  };
  const auto unless_taken = [&](const std::function<void()>& body) {
    const std::string error = error_of(body);
    if (error.empty()) return;
    refuse_if_taken();
    throw Error(error);
  };
  const std::string folder = from_rank_0(world, [&]() -> std::string {
    owner = held_or_free(files, run);
    if (owner) return "";
    unless_taken([&] { staged = std::make_unique<StagedFolder>(files, mark_of(run)); });
    owner = std::shared_ptr<RunOwner>(new RunOwner(files, run, staged->path().substr(run.size())));
    return staged->path();
  });
  if (folder.empty()) return owner;
  Facts facts = of_this_process();
  if (owner) facts["id"] = owner->id_;
  facts["since"] = now();
  const std::string text = text_of(facts);
  const std::string error = error_of([&] { write_file(files, folder + file_of(world.rank()), text); });
  const std::vector<std::string> sizes = gather_texts(world, error.empty() ? std::to_string(text.size()) : "");
  if (std::find(sizes.begin(), sizes.end(), "") != sizes.end()) from_rank_0(world, refuse_if_taken);
  agree(world, error);
  from_rank_0(world, [&] {
    unless_taken([&] {
      for (int64_t rank = 0; rank < world.size(); ++rank)
        require_written(files, folder + file_of(rank), std::stoull(sizes[static_cast<size_t>(rank)]));
      staged->commit();
    });
    {
      const std::lock_guard lock(held().mutex);
      held().owners[owner->id_] = owner;
    }
    remove_leftovers(files, run);
    return std::string();
  });
  return owner;
}

}  // namespace shardproof::checkpoint
