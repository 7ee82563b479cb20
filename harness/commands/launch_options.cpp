#include "harness/commands/launch_options.h"

#include <ATen/Parallel.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <signal.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdlib>
#include <iterator>

#include "harness/run/engine.h"
#include "harness/run/ranks.h"
#include "harness/run/reproducible.h"
#include "harness/train/stop_request.h"
#include "shardproof/comm/require_same.h"
#include "shardproof/device/kernels/cuda.h"
#include "shardproof/launch/nccl_launch.h"

namespace harness {
namespace {

std::vector<std::string>& remembered() {
  static std::vector<std::string> arguments;
  return arguments;
}

// argv but --ranks N or --ranks=N.
std::vector<std::string> without_ranks(const std::vector<std::string>& arguments) {
  std::vector<std::string> kept;
  for (size_t i = 0; i < arguments.size(); ++i) {
    if (arguments[i] == "--ranks")
      ++i;
    else if (!arguments[i].starts_with("--ranks="))
      kept.push_back(arguments[i]);
  }
  return kept;
}

}  // namespace

void remember_arguments(int argc, char** argv) {
  remembered().assign(argv, argv + argc);
}

void add_engine_option(CLI::App& command, std::string& engine) {
  command
      .add_option("--engine", engine,
                  fmt::format("whose sharded training is run: shardproof's, one of {}, or that of a function of yours, as "
                              "module:function, which takes a model and a mesh, and ep if it has a parameter of that name",
                              fmt::join(Engine::names(), ", ")))
      ->capture_default_str();
}

std::unique_ptr<Ranks> Launched::registered() const {
  const std::vector<std::string> names = names_of_backends();
  SHARD_REQUIRE(std::ranges::count(names, options.backend) > 0, "launch", "--backend must be one of {}, got '{}'",
                fmt::join(names, ", "), options.backend);
  std::unique_ptr<Ranks> own = registered_ranks(options.backend);
  if (!own) return nullptr;
  const shardproof::LaunchOptions usual;
  SHARD_REQUIRE(options.device == usual.device && options.ranks == usual.ranks, "launch",
                "--backend {} has a device and ranks of its own; leave out --device and --ranks", options.backend);
  refuse_without_effect();
  return own;
}

void Launched::require_threads(const std::string& what) const {
  const shardproof::LaunchOptions usual;
  SHARD_REQUIRE(options.backend == usual.backend && options.device == usual.device && options.ranks == usual.ranks, "launch",
                "{}; leave out --device, --backend and --ranks", what);
  refuse_without_effect();
}

void Launched::add_to(CLI::App& command, bool ranks_option) {
  command.add_option("--backend", options.backend, "what ranks are: threads of this process, or processes over mpi or nccl")
      ->capture_default_str();
  command
      .add_option("--device", options.device,
                  "cpu; or cuda, where threads share the first GPU and processes of nccl have one each")
      ->capture_default_str();
  if (ranks_option) command.add_option("--ranks", options.ranks, "start so many processes, with --backend mpi or nccl");
  of_processes_ = {
      command
          .add_option("--timeout", mpi.timeout_seconds,
                      "how many seconds ranks wait for one of them, with --backend mpi or nccl")
          ->capture_default_str(),
      command.add_option("--flight-dir", mpi.flight_directory,
                         "the folder where each rank leaves its last calls if it fails, with --backend mpi or nccl")};
  of_nccl_ = {
      command.add_option("--sum", sum, "how sums are taken: in rank_order by kernels, or native by NCCL; with --backend nccl")
          ->check(CLI::IsMember({"rank_order", "native"}))
          ->capture_default_str(),
      command.add_flag("--registered-buffers", registered_buffers,
                       "register buffers and buckets with NCCL, with --backend nccl")};
}

namespace {

void check_connections(int64_t compute_capability_major) {
  using Verdict = shardproof::Advice::Verdict;
  // Gathers and reductions of shards overlap compute; tensor-parallel calls do not rely on the order of launches.
  const shardproof::Advice advice =
      shardproof::check_device_connections(std::getenv("CUDA_DEVICE_MAX_CONNECTIONS"), compute_capability_major, true, false);
  SHARD_REQUIRE(advice.verdict != Verdict::refuse, "launch", "{}", advice.text);
  if (advice.verdict == Verdict::warn) fmt::print(stderr, "warning: {}\n", advice.text);
}

void note_symmetric_kernels(shardproof::NcclApi& api, bool one_host, const shardproof::GpuSharing& sharing, bool native_sums) {
  const std::string note = shardproof::symmetric_kernels_note(api.why_no_windows(), sharing.way, one_host, native_sums,
                                                              shardproof::process_environment());
  if (!note.empty()) fmt::print(stderr, "note: {}\n", note);
}

}  // namespace

void Launched::refuse_without_effect() const {
  const auto require_none = [&](const std::vector<CLI::Option*>& given, const char* backends) {
    for (const CLI::Option* option : given)
      SHARD_REQUIRE(option->count() == 0, "launch", "{} is for --backend {}, got --backend {}", option->get_name(), backends,
                    options.backend);
  };
  if (options.backend != "nccl") require_none(of_nccl_, "nccl");
  if (options.backend != "mpi" && options.backend != "nccl") require_none(of_processes_, "mpi or nccl");
}

std::string Launched::given() const {
  std::string text;
  for (const auto& list : {of_processes_, of_nccl_})
    for (const CLI::Option* option : list)
      for (const std::string& value : option->results())
        text += option->get_items_expected_max() == 0 ? " " + option->get_name()
                                                      : fmt::format(" {} '{}'", option->get_name(), value);
  return text;
}

void Launched::use_gpu(int64_t index) {
  if (options.device != "cuda") return;
  if (reproducible) compute_reproducibly();
  shardproof::use_cuda();
  device_ = c10::Device(c10::kCUDA, static_cast<c10::DeviceIndex>(index));
}

int exit_code_of_ranks(int code) {
  return code == kStoppedAsAsked ? code : std::min(code, 2);
}

std::unique_ptr<shardproof::ProcessWorld> Launched::start_nccl(const shardproof::Launch& launch) {
  if (launch.starts > 0) {
    const int code = shardproof::start_ranks(launch.starts, remembered(), kStoppedAsAsked), ours = exit_code_of_ranks(code);
    for (const int signal : {SIGINT, SIGTERM, SIGUSR1})
      if (code == 128 + signal) ::raise(signal);  // as it would have ended without ranks
    if (code != ours)
      fmt::print(stderr, "shardproof: a rank ended with {}\n",
                 code > 128 ? fmt::format("signal {}", code - 128) : fmt::format("exit code {}", code));
    std::exit(ours);
  }
  shardproof::TcpStoreOptions address = shardproof::store_address(launch, shardproof::process_environment());
  address.timeout_seconds = mpi.timeout_seconds;
  auto store = std::make_shared<shardproof::TcpStore>(address);
  try {
    return join_nccl(launch, store);
  } catch (const std::exception& error) {
    shardproof::end_world(store, fmt::format("rank {}: {}", launch.rank, error.what()));
    throw;
  }
}

std::unique_ptr<shardproof::ProcessWorld> Launched::join_nccl(const shardproof::Launch& launch,
                                                              std::shared_ptr<shardproof::NcclStore> store) {
  const shardproof::RankPlace place = shardproof::own_place(launch);
  const shardproof::GpuChoice gpu =
      shardproof::choose_gpu(launch.rank, shardproof::meet(*store, launch, place, mpi.timeout_seconds));
  const shardproof::GpuSharing sharing = shardproof::share_gpus(shardproof::nccl_version(), 1, gpu.ranks_of_gpu);
  SHARD_REQUIRE(sharing.way != shardproof::GpuSharing::Way::impossible, "launch", "{}", sharing.text);
  if (launch.rank == 0 && !sharing.text.empty()) fmt::print(stderr, "note: {}\n", sharing.text);
  for (const auto& [name, value] : shardproof::sharing_variables(sharing, 1, gpu.nth, place.host))
    ::setenv(name.c_str(), value.c_str(), /*overwrite=*/0);
  use_gpu(gpu.device);
  check_connections(shardproof::nccl_compute_capability(gpu.device));
  const auto api = shardproof::nccl_api(gpu.device);
  if (registered_buffers && launch.rank == 0) note_symmetric_kernels(*api, gpu.one_host, sharing, sum == "native");
  const shardproof::NcclOptions nccl{
      .sum = sum == "native" ? shardproof::NcclOptions::Sum::native : shardproof::NcclOptions::Sum::rank_order,
      .buffers = registered_buffers ? shardproof::NcclApi::Memory::symmetric : shardproof::NcclApi::Memory::plain,
      .timeout_seconds = mpi.timeout_seconds,
      .flight_directory = mpi.flight_directory,
      .flight_calls_max = mpi.flight_calls_max};
  return std::make_unique<shardproof::NcclWorld>(launch.rank, launch.world, std::move(store), api, nccl);
}

std::unique_ptr<shardproof::ProcessWorld> Launched::start(const std::string& mesh, const std::string& settings) {
  SHARD_REQUIRE(mpi.timeout_seconds > 0, "launch", "--timeout must be above 0, got {}", mpi.timeout_seconds);
  const std::vector<std::string> own = without_ranks(remembered());
  refuse_without_effect();
  if (options.backend == "nccl") {
    // Before CUDA looks.
    if (const std::string gpus = shardproof::dealt_gpus(shardproof::process_environment()); !gpus.empty())
      ::setenv("CUDA_VISIBLE_DEVICES", gpus.c_str(), /*overwrite=*/0);
    options.gpus = shardproof::nccl_devices();
  }
  const shardproof::Launch launch = shardproof::launch(options, own);
  if (options.backend == "threads") {
    use_gpu(0);
    return nullptr;
  }
  at::set_num_threads(1);
  std::unique_ptr<shardproof::ProcessWorld> world;
  if (options.backend == "nccl")
    world = start_nccl(launch);
  else
    world = std::make_unique<shardproof::MpiWorld>(mpi);
  shardproof::require_joined(world->rank(), world->size());
  world->run([&](std::shared_ptr<shardproof::Comm> comm) {
    shardproof::Facts facts = {{"program", shardproof::program_hash()},
                               {"command line", fmt::format("{}", fmt::join(own.begin() + 1, own.end(), " "))},
                               {"mesh", mesh},
                               {"settings", settings}};
    std::ranges::move(shardproof::torch_facts(), std::back_inserter(facts));
    shardproof::require_same(*comm, facts);
  });
  return world;
}

void on_each(shardproof::ProcessWorld* processes, const std::function<void(shardproof::Comm*)>& body) {
  if (!processes) return body(nullptr);
  processes->run([&](const std::shared_ptr<shardproof::Comm>& comm) { body(comm.get()); });
}

}  // namespace harness
