// The binding to NCCL and to the CUDA runtime, on doubles of the two libraries: each function reaches its own entry point with
// its own arguments, and what the libraries answer comes back.
#include <ATen/ATen.h>
#include <c10/core/TensorImpl.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>
#include <nccl.h>
#include <rapidcheck/gtest.h>

#include <cstdlib>
#include <cstring>
#include <functional>

#include "properties/doubles/gpu_libraries.h"
#include "properties/kit/expect_error.h"
#include "shardproof/comm/nccl/nccl_api.h"
#include "shardproof/device/kernels/cuda.h"

using namespace shardproof;
using gpu_libraries::answers;
using gpu_libraries::calls;
using gpu_libraries::entry_call;
using gpu_libraries::EntryCall;

namespace {

constexpr auto kSuccess = NcclResult::success;

// The binding for one of several GPUs, of which nothing was asked yet.
std::shared_ptr<NcclApi> fresh_api(int64_t device = 0) {
  gpu_libraries::forget();
  answers().devices = 8;
  std::shared_ptr<NcclApi> api = nccl_api(device);
  calls().clear();
  return api;
}

// What it was called with since the last time that this was asked.
std::vector<EntryCall> taken() {
  return std::exchange(calls(), {});
}

void* address(int64_t number) {
  return reinterpret_cast<void*>(number);
}

struct Drawn {
  void* input = address(*rc::gen::inRange<int64_t>(1, 1 << 20));
  void* output = address(*rc::gen::inRange<int64_t>(1, 1 << 20));
  NcclApi::Communicator comm = address(*rc::gen::inRange<int64_t>(1, 1 << 20));
  NcclApi::Stream stream = address(*rc::gen::inRange<int64_t>(1, 1 << 20));
  int64_t count = *rc::gen::inRange<int64_t>(0, int64_t{1} << 40);
  int64_t rank = *rc::gen::inRange<int64_t>(0, 1024);
};

const std::vector<std::pair<at::ScalarType, ncclDataType_t>> kTypes = {
    {at::kFloat, ncclFloat32}, {at::kDouble, ncclFloat64}, {at::kBFloat16, ncclBfloat16}, {at::kHalf, ncclFloat16},
    {at::kInt, ncclInt32},     {at::kLong, ncclInt64},     {at::kByte, ncclUint8}};

template <typename T>
std::string eight_bytes(T value) {
  std::string bytes(8, '\0');
  std::memcpy(bytes.data(), &value, sizeof value);
  return bytes;
}

// LibTorch's view of a GPU, whose current stream on device n is number 0x100 + n.
struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return c10::DeviceType::CUDA; }
  c10::Device exchangeDevice(c10::Device device) const override { return device; }
  c10::Device getDevice() const override { return {c10::DeviceType::CUDA, 0}; }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::Stream getStream(c10::Device device) const override {
    return c10::Stream(c10::Stream::UNSAFE, device, 0x100 + device.index());
  }
  c10::Stream exchangeStream(c10::Stream stream) const override { return stream; }
  void* getStreamNativeHandle(const c10::Stream stream) const override { return address(stream.id()); }
  c10::DeviceIndex deviceCount() const noexcept override { return 8; }
};

}  // namespace

RC_GTEST_PROP(NcclApi, bytes_go_to_the_peer_or_from_the_root_on_the_stream_that_was_named, ()) {
  const auto api = fresh_api();
  const Drawn d;
  RC_ASSERT(api->send(d.input, d.count, d.rank, d.comm, d.stream) == kSuccess);
  RC_ASSERT(api->recv(d.output, d.count, d.rank, d.comm, d.stream) == kSuccess);
  RC_ASSERT(api->all_gather(d.input, d.output, d.count, d.comm, d.stream) == kSuccess);
  RC_ASSERT(api->broadcast(d.output, d.count, d.rank, d.comm, d.stream) == kSuccess);
  RC_ASSERT(taken() == (std::vector<EntryCall>{
                           entry_call("ncclSend", d.input, d.count, ncclUint8, d.rank, d.comm, d.stream),
                           entry_call("ncclRecv", d.output, d.count, ncclUint8, d.rank, d.comm, d.stream),
                           entry_call("ncclAllGather", d.input, d.output, d.count, ncclUint8, d.comm, d.stream),
                           entry_call("ncclBroadcast", d.output, d.output, d.count, ncclUint8, d.rank, d.comm, d.stream)}));
}

RC_GTEST_PROP(NcclApi, sums_name_the_number_of_elements_their_dtype_and_the_operator, ()) {
  const auto api = fresh_api();
  const Drawn d;
  const auto [dtype, type] = *rc::gen::elementOf(kTypes);
  const auto [reduce, op] = *rc::gen::elementOf(
      std::vector<std::pair<Reduce, ncclRedOp_t>>{{Reduce::sum, ncclSum}, {Reduce::max, ncclMax}, {Reduce::min, ncclMin}});
  const NcclApi::Operator number = NcclApi::operator_of(reduce);
  RC_ASSERT(api->all_reduce(d.input, d.output, d.count, dtype, number, d.comm, d.stream) == kSuccess);
  RC_ASSERT(api->reduce_scatter(d.input, d.output, d.count, dtype, number, d.comm, d.stream) == kSuccess);
  RC_ASSERT(taken() ==
            (std::vector<EntryCall>{entry_call("ncclAllReduce", d.input, d.output, d.count, type, op, d.comm, d.stream),
                                    entry_call("ncclReduceScatter", d.input, d.output, d.count, type, op, d.comm, d.stream)}));
}

TEST(NcclApi, a_factor_is_read_from_the_host_in_the_dtype_of_the_terms) {
  const auto api = fresh_api();
  const double factor = 1.0 / 3;
  const std::vector<std::pair<at::ScalarType, std::string>> scalars = {
      {at::kDouble, eight_bytes(factor)},
      {at::kFloat, eight_bytes(static_cast<float>(factor))},
      {at::kHalf, eight_bytes(c10::Half(static_cast<float>(factor)))},
      {at::kBFloat16, eight_bytes(c10::BFloat16(static_cast<float>(factor)))}};
  for (const auto& [dtype, bytes] : scalars) {
    NcclApi::Operator op = 0;
    ASSERT_EQ(api->create_premultiplied_sum(op, factor, dtype, address(5)), kSuccess);
    EXPECT_EQ(op, 17) << "NCCL's number of the operator";
    const auto is_of_dtype = [&dtype = dtype](const auto& t) { return t.first == dtype; };
    const auto type = std::find_if(kTypes.begin(), kTypes.end(), is_of_dtype)->second;
    EntryCall made = entry_call("ncclRedOpCreatePreMulSum", type, ncclScalarHostImmediate, 5);
    made.content = bytes;
    EXPECT_EQ(taken(), std::vector<EntryCall>{made}) << dtype;
    EXPECT_EQ(api->destroy_operator(op, address(5)), kSuccess);
    EXPECT_EQ(taken(), std::vector<EntryCall>{entry_call("ncclRedOpDestroy", 17, 5)});
  }
}

TEST(NcclApi, a_communicator_is_made_without_blocking_from_the_id_of_its_ranks) {
  const auto api = fresh_api();
  NcclApi::UniqueId id{};
  ASSERT_EQ(api->get_unique_id(id), kSuccess);
  EXPECT_EQ(id[127], 127) << "the whole id is NCCL's";
  taken();
  NcclApi::Communicator comm = nullptr;
  ASSERT_EQ(api->init_rank(comm, 6, id, 4), kSuccess);
  EXPECT_NE(comm, nullptr);
  EntryCall made = entry_call("ncclCommInitRankConfig", 6, 4, 0);
  made.content.assign(id.begin(), id.end());
  EXPECT_EQ(taken(), std::vector<EntryCall>{made});
}

TEST(NcclApi, a_split_puts_ranks_of_one_color_together_in_the_order_of_keys) {
  const auto api = fresh_api();
  NcclApi::Communicator child = nullptr;
  ASSERT_EQ(api->split(address(3), 2, 7, child), kSuccess);
  EXPECT_NE(child, nullptr);
  EXPECT_EQ(taken(), std::vector<EntryCall>{entry_call("ncclCommSplit", 3, 2, 7, 0)});
}

TEST(NcclApi, groups_begin_and_end) {
  const auto api = fresh_api();
  EXPECT_EQ(api->group_start(), kSuccess);
  EXPECT_EQ(api->group_end(), kSuccess);
  EXPECT_EQ(taken(), (std::vector<EntryCall>{entry_call("ncclGroupStart"), entry_call("ncclGroupEnd")}));
}

TEST(NcclApi, what_nccl_answers_comes_back_from_every_function) {
  const auto api = fresh_api();
  void *x = address(1), *made = nullptr;
  NcclApi::UniqueId id{};
  NcclApi::Operator op = 0;
  const std::map<std::string, std::function<NcclResult()>> functions = {
      {"ncclGetUniqueId", [&] { return api->get_unique_id(id); }},
      {"ncclCommInitRankConfig", [&] { return api->init_rank(made, 1, id, 0); }},
      {"ncclCommSplit", [&] { return api->split(x, 0, 0, made); }},
      {"ncclCommGetAsyncError", [&] { return api->async_error(x); }},
      {"ncclGroupStart", [&] { return api->group_start(); }},
      {"ncclGroupEnd", [&] { return api->group_end(); }},
      {"ncclSend", [&] { return api->send(x, 1, 0, x, x); }},
      {"ncclRecv", [&] { return api->recv(x, 1, 0, x, x); }},
      {"ncclAllGather", [&] { return api->all_gather(x, x, 1, x, x); }},
      {"ncclBroadcast", [&] { return api->broadcast(x, 1, 0, x, x); }},
      {"ncclAllReduce", [&] { return api->all_reduce(x, x, 1, at::kFloat, 0, x, x); }},
      {"ncclReduceScatter", [&] { return api->reduce_scatter(x, x, 1, at::kFloat, 0, x, x); }},
      {"ncclRedOpCreatePreMulSum", [&] { return api->create_premultiplied_sum(op, 0.5, at::kFloat, x); }},
      {"ncclRedOpDestroy", [&] { return api->destroy_operator(0, x); }},
      {"ncclCommRegister", [&] { return api->register_memory(x, x, 1, NcclApi::Memory::registered, made); }},
      {"ncclCommWindowRegister", [&] { return api->register_memory(x, x, 1, NcclApi::Memory::symmetric, made); }},
      {"ncclCommDeregister", [&] { return api->deregister_memory(x, x, NcclApi::Memory::registered); }},
      {"ncclCommWindowDeregister", [&] { return api->deregister_memory(x, x, NcclApi::Memory::symmetric); }}};
  for (const auto& [name, function] : functions)
    for (int result = 0; result <= ncclInProgress; ++result) {
      answers().results = {{name, result}};
      EXPECT_EQ(static_cast<int>(function()), result) << name;
    }
}

TEST(NcclApi, an_asynchronous_error_is_that_of_the_communicator_and_has_a_text) {
  const auto api = fresh_api();
  answers().async_errors = {ncclRemoteError};
  EXPECT_EQ(api->async_error(address(9)), NcclResult::remote_error);
  EXPECT_EQ(taken(), std::vector<EntryCall>{entry_call("ncclCommGetAsyncError", 9)});
  EXPECT_EQ(api->error_text(NcclResult::remote_error, address(9)), "result 6");
  EXPECT_EQ(taken(), std::vector<EntryCall>{entry_call("ncclGetLastError", 9)});
  answers().last_error = "the cable is gone";
  EXPECT_EQ(api->error_text(NcclResult::system_error, address(9)),
            "result 2; the last warning of NCCL in this process: the cable is gone");
}

TEST(NcclApi, a_communicator_is_destroyed_when_its_end_is_no_longer_in_progress) {
  const auto api = fresh_api();
  answers().async_errors = {ncclInProgress, ncclInProgress};
  api->destroy(address(4));
  const EntryCall asked = entry_call("ncclCommGetAsyncError", 4);
  EXPECT_EQ(taken(),
            (std::vector<EntryCall>{entry_call("ncclCommFinalize", 4), asked, asked, asked, entry_call("ncclCommDestroy", 4)}));
  answers().async_errors = {ncclInProgress, ncclRemoteError};
  api->destroy(address(4));
  EXPECT_EQ(taken(),
            (std::vector<EntryCall>{entry_call("ncclCommFinalize", 4), asked, asked, entry_call("ncclCommAbort", 4)}))
      << "after an error NCCL's destroy leaves a group open";
  api->abort(address(4));
  EXPECT_EQ(taken(), std::vector<EntryCall>{entry_call("ncclCommAbort", 4)});
}

TEST(NcclApi, memory_is_registered_one_by_one_or_as_a_symmetric_window) {
  const auto api = fresh_api();
  EXPECT_EQ(api->why_no_windows(), "");
  void *handle = nullptr, *window = nullptr;
  api->register_memory(address(1), address(2), 64, NcclApi::Memory::registered, handle);
  api->deregister_memory(address(1), handle, NcclApi::Memory::registered);
  api->register_memory(address(1), address(3), 96, NcclApi::Memory::symmetric, window);
  api->deregister_memory(address(1), window, NcclApi::Memory::symmetric);
  EXPECT_EQ(taken(),
            (std::vector<EntryCall>{entry_call("ncclCommRegister", 1, 2, 64), entry_call("ncclCommDeregister", 1, handle),
                                    entry_call("ncclCommWindowRegister", 1, 3, 96, NCCL_WIN_COLL_SYMMETRIC),
                                    entry_call("ncclCommWindowDeregister", 1, window)}));
}

TEST(NcclApi, memory_goes_back_to_where_it_came_from) {
  const auto api = fresh_api();
  void* plain = api->allocate(48, NcclApi::Memory::plain);
  void* registered = api->allocate(64, NcclApi::Memory::registered);
  void* symmetric = api->allocate(80, NcclApi::Memory::symmetric);
  void* pinned = api->allocate(96, NcclApi::Memory::pinned);
  api->release(plain, NcclApi::Memory::plain);
  api->release(registered, NcclApi::Memory::registered);
  api->release(symmetric, NcclApi::Memory::symmetric);
  api->release(pinned, NcclApi::Memory::pinned);
  EXPECT_EQ(taken(), (std::vector<EntryCall>{entry_call("cudaMalloc", 48), entry_call("ncclMemAlloc", 64),
                                             entry_call("ncclMemAlloc", 80), entry_call("cudaMallocHost", 96),
                                             entry_call("cudaFree", plain), entry_call("ncclMemFree", registered),
                                             entry_call("ncclMemFree", symmetric), entry_call("cudaFreeHost", pinned)}));
  answers().results = {{"cudaMalloc", cudaErrorMemoryAllocation}, {"ncclMemAlloc", ncclSystemError}};
  expect_error([&] { api->allocate(48, NcclApi::Memory::plain); }, {"[cuda] cudaMalloc: ", "(cudaErrorMemoryAllocation)"});
  expect_error([&] { api->allocate(64, NcclApi::Memory::symmetric); }, {"[nccl] ncclMemAlloc of 64 bytes: result 2"});
}

TEST(NcclApi, streams_and_events_order_work_on_the_gpu_of_the_rank) {
  const auto api = fresh_api(5);
  api->use_device();
  void* stream = api->make_stream();
  void* event = api->make_event();
  api->record(event, stream);
  api->wait(address(8), event);
  api->copy(address(1), address(2), 24, stream);
  EXPECT_TRUE(api->is_complete(event));
  api->synchronize();
  api->destroy_event(event);
  api->destroy_stream(stream);
  EXPECT_EQ(taken(), (std::vector<EntryCall>{
                         entry_call("cudaSetDevice", 5), entry_call("cudaStreamCreateWithFlags", cudaStreamNonBlocking),
                         entry_call("cudaEventCreateWithFlags", cudaEventDisableTiming),
                         entry_call("cudaEventRecord", event, stream), entry_call("cudaStreamWaitEvent", 8, event, 0),
                         entry_call("cudaMemcpyAsync", 1, 2, 24, cudaMemcpyDefault, stream),
                         entry_call("cudaEventQuery", event), entry_call("cudaSetDevice", 5),
                         entry_call("cudaDeviceSynchronize"), entry_call("cudaEventDestroy", event),
                         entry_call("cudaStreamSynchronize", stream), entry_call("cudaStreamDestroy", stream)}));
}

TEST(NcclApi, what_fails_in_cuda_is_named_with_the_reason_of_cuda) {
  const auto api = fresh_api();
  void* x = address(1);
  const std::map<std::string, std::function<void()>> functions = {
      {"cudaSetDevice", [&] { api->use_device(); }},      {"cudaStreamCreate", [&] { api->make_stream(); }},
      {"cudaEventCreate", [&] { api->make_event(); }},    {"cudaEventRecord", [&] { api->record(x, x); }},
      {"cudaStreamWaitEvent", [&] { api->wait(x, x); }},  {"cudaEventQuery", [&] { api->is_complete(x); }},
      {"cudaMemcpyAsync", [&] { api->copy(x, x, 1, x); }}};
  for (const auto& [name, function] : functions) {
    answers().results = {{name, cudaErrorLaunchFailure}, {name + "WithFlags", cudaErrorLaunchFailure}};
    expect_error(function, {"[cuda] " + name + ": ", "(cudaErrorLaunchFailure)"});
  }
  answers().results = {{"cudaEventQuery", cudaErrorNotReady}};
  EXPECT_FALSE(api->is_complete(x)) << "work that is on its way is no error";
}

TEST(NcclApi, a_tensor_is_on_the_device_when_kernels_can_read_it) {
  const auto api = fresh_api(1);
  EXPECT_FALSE(api->is_on_device(at::ones({2})));
  const at::Tensor on_gpu(c10::make_intrusive<c10::TensorImpl>(
      c10::DispatchKeySet(c10::DispatchKey::CUDA), caffe2::TypeMeta::Make<float>(), c10::Device(c10::DeviceType::CUDA, 1)));
  EXPECT_TRUE(api->is_on_device(on_gpu));
  EXPECT_TRUE(api->is_device({c10::DeviceType::CUDA, 1}));
  EXPECT_TRUE(api->is_device({c10::DeviceType::CUDA}));
  EXPECT_FALSE(api->is_device({c10::DeviceType::CUDA, 0}));
  EXPECT_FALSE(api->is_device({c10::DeviceType::CPU}));
}

TEST(NcclApi, the_current_stream_is_torchs_on_the_gpu_of_the_rank) {
  const auto api = fresh_api(3);
  EXPECT_EQ(api->current_stream(), nullptr) << "the default stream, as LibTorch's CUDA parts are not loaded";
  static const Guard guard;
  const c10::impl::DeviceGuardImplRegistrar registrar(c10::DeviceType::CUDA, &guard);
  EXPECT_EQ(api->current_stream(), address(0x103));
}

TEST(NcclApi, gpus_and_versions_are_counted_and_are_none_where_nobody_answers) {
  gpu_libraries::forget();
  answers().devices = 4;
  EXPECT_TRUE(nccl_available());
  EXPECT_EQ(nccl_devices(), 4);
  EXPECT_EQ(nccl_version(), 22809);
  taken();
  EXPECT_EQ(nccl_compute_capability(2), 9);
  EXPECT_EQ(taken(), std::vector<EntryCall>{entry_call("cudaDeviceGetAttribute", cudaDevAttrComputeCapabilityMajor, 2)});
  EXPECT_EQ(nccl_device_id(2), "a2a2a2a2a2a2a2a2a2a2a2a2a2a2a2a2");
  answers().results = {{"cudaGetDeviceCount", cudaErrorNoDevice},
                       {"ncclGetVersion", ncclSystemError},
                       {"cudaDeviceGetAttribute", cudaErrorInvalidDevice}};
  EXPECT_EQ(nccl_devices(), 0);
  EXPECT_EQ(nccl_version(), 0);
  EXPECT_EQ(nccl_compute_capability(2), 0);
}

TEST(NcclApi, a_gpu_that_is_not_there_is_refused_with_the_number_that_are) {
  gpu_libraries::forget();
  answers().devices = 2;
  expect_error([] { nccl_api(2); }, {"[nccl] there is no GPU 2: this process sees 2", "CUDA_VISIBLE_DEVICES"});
  expect_error([] { nccl_api(-1); }, {"[nccl] there is no GPU -1"});
  answers().devices = 0;
  expect_error([] { nccl_api(0); }, {"[nccl] this machine has no GPU that NCCL could use: CUDA finds 0", "--backend mpi"});
  gpu_libraries::forget();
  answers().results = {{"cudaGetDeviceCount", cudaErrorInsufficientDriver}};
  expect_error([] { nccl_api(0); }, {"[nccl] this machine has no GPU", "driver"});
}

TEST(NcclApi, an_environment_in_which_calls_block_is_refused) {
  fresh_api();
  ::setenv("NCCL_COMM_BLOCKING", "1", 1);
  expect_error([] { nccl_api(0); }, {"NCCL_COMM_BLOCKING=1", "Unset it"});
  ::setenv("NCCL_COMM_BLOCKING", "0", 1);
  EXPECT_NE(nccl_api(0), nullptr);
  ::unsetenv("NCCL_COMM_BLOCKING");
}

TEST(NcclApi, sums_in_rank_order_need_kernels_and_a_sum_of_nothing_launches_none) {
  const auto api = fresh_api();
  if (cuda_built()) {
    EXPECT_EQ(api->why_no_sums(), "");
    api->reduce(at::kFloat, Reduce::sum, {}, 0, nullptr, address(1));
    EXPECT_TRUE(calls().empty());
  } else {
    expect_says(api->why_no_sums(), {"sums in rank order need CUDA kernels", why_no_cuda(), "--sum native"});
    expect_error([&] { api->reduce(at::kFloat, Reduce::sum, {}, 0, nullptr, address(1)); }, {"[nccl] sums in rank order"});
  }
}

TEST(Cuda, says_what_is_missing_on_this_machine) {
  if (!cuda_built()) GTEST_SKIP() << why_no_cuda();
  gpu_libraries::forget();
  EXPECT_EQ(why_no_cuda(), "");
  answers().devices = 0;
  EXPECT_EQ(why_no_cuda(), "no GPU");
  answers().results = {{"cudaGetDeviceCount", cudaErrorNoDevice}};
  EXPECT_EQ(why_no_cuda(), "no GPU");
  answers().results = {{"cudaGetDeviceCount", cudaErrorMemoryAllocation}};
  expect_says(why_no_cuda(), {"no usable GPU: ", "memory"});
  expect_error([] { use_cuda(); }, {"[cuda] CUDA cannot be used here: no usable GPU", "nvidia-smi"});
  answers().driver = 0;
  EXPECT_EQ(why_no_cuda(), "no driver");
}
