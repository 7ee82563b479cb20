#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <charconv>
#include <cstdlib>
#include <cstring>
#include <map>
#include <set>

#include "shardproof/base/check.h"
#include "shardproof/launch/nccl_launch.h"

namespace shardproof {
namespace {

constexpr int64_t kConnectionsMax = 32;
constexpr int64_t kBlackwell = 10;
constexpr int64_t kHostIds = 22800, kMultiRank = 23000;
// More than so many ranks of one GPU run out of channels in NCCL's default configuration.
constexpr int64_t kMultiRankDefault = 2;

const char* nonempty(const Environment& environment, const char* name) {
  const char* value = environment(name);
  return value && *value ? value : nullptr;
}

// Of a job: the same on all of its ranks, and most likely on those of no other.
std::string job_number(const Launch& launch, const Environment& environment) {
  std::vector<const char*> names;
  if (launch.launcher == Launcher::mpirun) names = {"PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"};
  if (launch.launcher == Launcher::slurm) names = {"SLURM_JOB_ID", "SLURM_STEP_ID"};
  std::string text;
  for (const char* name : names)
    if (const char* value = nonempty(environment, name)) text += fmt::format("{}={} ", name, value);
  return text;
}

int64_t port_from(const char* text) {
  int64_t port = 0;
  const auto [end, error] = std::from_chars(text, text + std::strlen(text), port);
  SHARD_REQUIRE(error == std::errc() && *end == '\0' && port > 0 && port < 65536, "launch",
                "MASTER_PORT must be a port, got '{}'", text);
  return port;
}

}  // namespace

Advice check_device_connections(const char* value, int64_t compute_capability_major, bool overlaps_sharding,
                                bool overlaps_tensor_parallel) {
  int64_t connections = 0;  // CUDA's own choice, which is several
  if (value && *value) {
    const auto [end, error] = std::from_chars(value, value + std::strlen(value), connections);
    if (error != std::errc() || *end != '\0' || connections < 1 || connections > kConnectionsMax)
      return {Advice::Verdict::refuse,
              fmt::format("CUDA_DEVICE_MAX_CONNECTIONS must be 1 to {}, got '{}'; unset it", kConnectionsMax, value)};
  }
  const bool wants_one = overlaps_tensor_parallel && compute_capability_major < kBlackwell;
  if (overlaps_sharding && connections == 1)
    return {
        Advice::Verdict::refuse,
        fmt::format("CUDA_DEVICE_MAX_CONNECTIONS=1 makes gathers and reductions wait behind the compute that they should "
                    "overlap; unset it{}",
                    wants_one ? ". (Tensor-parallel overlap before Blackwell wants 1: give up one of the two overlaps)" : "")};
  if (wants_one && connections != 1)
    return {Advice::Verdict::warn,
            fmt::format("tensor-parallel overlap before Blackwell relies on kernels starting in the order of their launch, and "
                        "CUDA_DEVICE_MAX_CONNECTIONS is {}: results are right, but communication may start late. {}",
                        connections == 0 ? "unset" : value,
                        overlaps_sharding ? "Overlap of sharding forbids 1, so that both cannot be had" : "Set it to 1")};
  return {};
}

GpuChoice choose_gpu(int64_t rank, const std::vector<RankPlace>& places) {
  GpuChoice choice;
  std::map<std::string, int64_t> ranks_of_host, ranks_of_gpu;
  for (int64_t other = 0; other < std::ssize(places); ++other) {
    const RankPlace& place = places[static_cast<size_t>(other)];
    const int64_t counted = ranks_of_host[place.host]++, gpus = std::ssize(place.gpus);
    SHARD_REQUIRE(gpus > 0, "launch", "rank {} on {} sees no GPU", other, place.host);
    const int64_t device = (place.local_rank < 0 ? counted : place.local_rank) % gpus;
    const int64_t nth = ranks_of_gpu[place.gpus[static_cast<size_t>(device)]]++;
    choice.ranks_of_gpu = std::max(choice.ranks_of_gpu, nth + 1);
    if (other == rank) choice.device = device, choice.nth = nth;
  }
  choice.one_host = ranks_of_host.size() == 1;
  return choice;
}

GpuSharing share_gpus(int64_t nccl_version, int64_t gpus, int64_t local_ranks) {
  if (gpus == 0) return {GpuSharing::Way::impossible, "this machine has no GPU"};
  if (local_ranks <= gpus) return {};
  const int64_t each = (local_ranks + gpus - 1) / gpus;
  if (nccl_version >= kMultiRank)
    return {
        GpuSharing::Way::multi_rank,
        fmt::format("up to {} ranks share a GPU by NCCL_MULTI_RANK_GPU_ENABLE{}", each,
                    each > kMultiRankDefault ? "; above 2 it needs NCCL_MAX_CTAS, or may run out of channels and hang" : "")};
  if (nccl_version >= kHostIds)
    return {GpuSharing::Way::host_ids,
            fmt::format("up to {} ranks share a GPU, each posing as another host by NCCL_HOSTID: their traffic takes sockets, "
                        "which tests what is computed and not how fast",
                        each)};
  return {GpuSharing::Way::impossible,
          fmt::format("NCCL {}.{} has no way for {} ranks on {} GPUs; use 2.28 or later, or as many ranks as GPUs",
                      nccl_version / 10000, nccl_version / 100 % 100, local_ranks, gpus)};
}

std::vector<std::pair<std::string, std::string>> sharing_variables(const GpuSharing& sharing, int64_t gpus, int64_t local_rank,
                                                                   const std::string& host) {
  if (sharing.way == GpuSharing::Way::multi_rank) return {{"NCCL_MULTI_RANK_GPU_ENABLE", "1"}};
  // The ranks of one GPU differ; those of different GPUs may meet on one host, and be as fast as without.
  if (sharing.way == GpuSharing::Way::host_ids) return {{"NCCL_HOSTID", fmt::format("{}-{}", host, local_rank / gpus)}};
  return {};
}

std::string symmetric_kernels_note(const std::string& why_no_windows, GpuSharing::Way sharing, bool one_host, bool native_sums,
                                   const Environment& environment) {
  const std::string none = "so NCCL's symmetric kernels take no call on registered buffers";
  if (!why_no_windows.empty())
    return fmt::format("{}: buffers are registered with ncclCommRegister, {}", why_no_windows, none);
  for (const char* name : {"NCCL_WIN_ENABLE", "NCCL_CUMEM_ENABLE"})
    if (const char* value = nonempty(environment, name); value && std::strcmp(value, "0") == 0)
      return fmt::format("{}=0 is set, {}", name, none);
  if (sharing == GpuSharing::Way::host_ids) return fmt::format("ranks of one GPU pose as other hosts, {}", none);
  std::vector<std::string> limits;
  if (!one_host) limits.push_back("calls among ranks of one host");
  if (!native_sums) limits.push_back("gathers, because sums in rank order are not NCCL's (--sum native)");
  if (limits.empty()) return {};
  return fmt::format("of calls on registered buffers NCCL's symmetric kernels take only {}",
                     fmt::join(limits, ", and of these only "));
}

// CTEST_RESOURCE_GROUP_0_GPUS is "id:0,slots:1;id:2,slots:1". Several slots of one GPU are one GPU.
std::string dealt_gpus(const Environment& environment) {
  const char* count = nonempty(environment, "CTEST_RESOURCE_GROUP_COUNT");
  std::set<std::string> gpus;
  for (int64_t group = 0; count && group < std::atoll(count); ++group) {
    const char* dealt = nonempty(environment, fmt::format("CTEST_RESOURCE_GROUP_{}_GPUS", group).c_str());
    const std::string text = dealt ? dealt : "";
    for (size_t at = text.find("id:"); at != std::string::npos; at = text.find("id:", at + 1))
      gpus.insert(text.substr(at + 3, text.find_first_of(",;", at) - at - 3));
  }
  return fmt::format("{}", fmt::join(gpus, ","));
}

std::string attempt_of(const Environment& environment) {
  const char *run = nonempty(environment, "TORCHELASTIC_RUN_ID"),
             *restarts = nonempty(environment, "TORCHELASTIC_RESTART_COUNT");
  return run || restarts ? fmt::format("{}/{}", run ? run : "", restarts ? restarts : "0") : "";
}

TcpStoreOptions store_address(const Launch& launch, const Environment& environment, const std::string& command) {
  if (launch.launcher == Launcher::none) return {.serves = true};
  const char *host = nonempty(environment, "MASTER_ADDR"), *port = nonempty(environment, "MASTER_PORT");
  SHARD_REQUIRE((host == nullptr) == (port == nullptr), "launch", "{} is set and {} is not; set both, or none",
                host ? "MASTER_ADDR" : "MASTER_PORT", host ? "MASTER_PORT" : "MASTER_ADDR");
  const std::string number = job_number(launch, environment);
  TcpStoreOptions options{
      .serves = launch.rank == 0, .job = fmt::format("{}{} ranks of {}", number, launch.world, command), .rank = launch.rank};
  if (host) {
    const char* agent = nonempty(environment, "TORCHELASTIC_USE_AGENT_STORE");
    const bool is_served = launch.launcher == Launcher::torchrun && agent && std::strcmp(agent, "True") == 0;
    // Agents of several hosts count restarts each by itself, and mostly have another store for each attempt.
    if (is_served && launch.local_world == launch.world) options.attempt = attempt_of(environment);
    options.host = host, options.port = port_from(port), options.serves = launch.rank == 0 && !is_served;
    return options;
  }
  SHARD_REQUIRE(
      launch.local_world == launch.world, "launch",
      "{} started {} processes, not all of them on this host: set MASTER_ADDR to the host of rank 0 and MASTER_PORT to a free "
      "port there, for all",
      to_string(launch.launcher), launch.world);
  uint64_t hash = 0xcbf29ce484222325;
  for (const char c : number) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3;
  options.port = 20000 + static_cast<int64_t>(hash % 10000);
  return options;
}

}  // namespace shardproof
