// Checkpoints of models on a device that is as late as it may be, and whose memory the host cannot touch.
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include <thread>

#include "harness/case/network.h"
#include "properties/doubles/fake_device.h"
#include "properties/kit/checkpoint_trained.h"
#include "shardproof/checkpoint/format/durable.h"
#include "shardproof/checkpoint/manager.h"

namespace shardproof::checkpoint {
namespace {

Recipe movable(Recipe setup) {
  fake_device::install();
  setup.move = &harness::move_to;
  return setup;
}
Place on_device(Place place) {
  place.device = fake_device::device();
  return place;
}
Place somewhere() {
  const Place place = any_place();
  return *rc::gen::arbitrary<bool>() ? on_device(place) : place;
}

// Trains, saves through a manager, and trains on at once; or, with `waits`, when the save is through. Training waits for the
// device, and so for copies that a save forgot to wait for.
void save_amid(const Recipe& setup, const Place& place, bool async, const std::string& directory, bool waits = false) {
  on(place, [&](std::shared_ptr<Comm> comm) {
    Trained run(setup, place, comm);
    run.train(0, 2);
    Manager manager(directory, {.async = async});
    manager.save(*run.sharded, &*run.optimizer, {.step = 2});
    if (waits) manager.wait();
    run.train(2, 3);
    manager.wait();
  });
}

// The values have been changed, and the device has yet to make them what they were when a save begins.
void change_and_restore(const Sharded& sharded) {
  const at::NoGradGuard no_grad;
  for (const Piece& piece : sharded.main_parameters()) piece.data.neg_();
  fake_device::synchronize();
  for (const Piece& piece : sharded.main_parameters()) piece.data.neg_();
}

// The files of the entries, by name. What names a save is random, and not in them.
Bits entry_files(const std::string& folder) {
  Bits files;
  for (const std::string& name : list_folder(folder))
    if (name.ends_with(".distcp")) files[name] = slurp(folder + "/" + name);
  return files;
}

TEST(DeviceCheckpoint, saved_on_a_device_it_has_the_bytes_of_one_saved_on_the_cpu) {
  const std::vector<Place> places = {{"dp_shard=3", "zero3"}, {"dp_replicate=2,dp_shard=2", "hsdp"}, {"dp_shard=2", "ddp"}};
  for (const Place& place : places)
    for (const bool tied : {false, true})
      for (const auto& [async, waits] : {std::pair(false, false), std::pair(true, false), std::pair(true, true)}) {
        const Recipe setup = movable({.tied = tied});
        const Scratch scratch;
        save_amid(setup, place, false, scratch / "cpu");
        save_amid(setup, on_device(place), async, scratch / "device", waits);
        const Bits expected = entry_files(scratch / "cpu/step_2"), got = entry_files(scratch / "device/step_2");
        ASSERT_FALSE(expected.empty());
        EXPECT_EQ(expected == got, true) << place.mesh << " " << place.strategy << " tied " << tied << " async " << async;
        EXPECT_TRUE(verify_checkpoint(system_files(), scratch / "device/step_2").problems.empty());
      }
}

TEST(DeviceCheckpoint, copies_of_values_on_a_device_are_staged_in_page_locked_memory) {
  const Recipe setup = movable({});
  const Place place{"dp_shard=2", "zero3"};
  for (const bool async : {false, true}) {
    const Scratch scratch;
    const int64_t before = fake_device::bytes_page_locked();
    save_amid(setup, place, async, scratch / "cpu");
    EXPECT_EQ(fake_device::bytes_page_locked(), before) << "values of the CPU";
    save_amid(setup, on_device(place), async, scratch / "device");
    EXPECT_GT(fake_device::bytes_page_locked(), before);
  }
}

RC_GTEST_PROP(DeviceCheckpoint, saved_on_either_it_loads_on_either_under_any_sharding, ()) {
  const Recipe setup = movable(any_setup());
  const Place from = somewhere(), to = somewhere();
  const LoadOptions options{.staging_bytes_max = static_cast<uint64_t>(*rc::gen::element<int64_t>(0, 100, 1 << 20))};
  const Scratch scratch;
  const Bits saved = trained(setup, from, 2, scratch / "at");
  Bits loaded, resumed;
  on(to, [&](std::shared_ptr<Comm> comm) {
    Trained run(setup, to, comm, 0.75);
    load(scratch / "at", *run.sharded, &*run.optimizer, options);
    Bits first = run.bits();
    run.train(2, 3);
    Bits second = run.bits();
    if (comm->rank() == 0) loaded = std::move(first), resumed = std::move(second);
  });
  RC_ASSERT(loaded == saved);
  RC_ASSERT(resumed == trained(setup, {"dp_shard=1", "zero3"}, 3, ""));
}

TEST(DeviceCheckpoint, a_job_without_a_snapshot_writes_in_the_streams_order_on_any_thread) {
  const Place place = on_device({"dp_shard=2", "zero3"});
  const Recipe setup = movable({});
  const Scratch scratch;
  const Bits expected = trained(setup, {"dp_shard=2", "zero3"}, 2, "");
  on(place, [&](std::shared_ptr<Comm> comm) {
    Trained run(setup, place, comm);
    run.train(0, 2);
    fake_device::synchronize();
    const c10::impl::VirtualGuardImpl streams(place.device.type());
    const c10::StreamGuard on_stream(streams.getStreamFromGlobalPool(place.device));
    change_and_restore(*run.sharded);
    SaveJob job(scratch / "at", *run.sharded, &*run.optimizer, {.step = 2}, {}, nullptr);
    std::thread([&] { job.write(); }).join();
    job.commit();
    Trained other(setup, place, comm, 0.75);
    load(scratch / "at", *other.sharded, &*other.optimizer);
    const Bits bits = other.bits();
    EXPECT_EQ(bits == expected, true) << "rank " << comm->rank();
  });
}

TEST(DeviceCheckpoint, buffers_are_on_the_device_when_a_load_returns_also_where_the_state_is_offloaded) {
  fake_device::install();
  for (const Offload offload : {Offload::none, Offload::pinned}) {
    Place place = on_device({"dp_shard=2", "zero3"});
    place.offload = offload;
    const Scratch scratch;
    on(place, [&](std::shared_ptr<Comm> comm) {
      Trained run(movable({}), place, comm);
      const at::Tensor seen = run.module->register_buffer("seen", at::full({100}, 3, place.device));
      run.train(0, 1);
      save(scratch / "at", *run.sharded, &*run.optimizer, {.step = 1});
      at::Tensor(seen).zero_();
      fake_device::synchronize();
      load(scratch / "at", *run.sharded, &*run.optimizer);
      EXPECT_EQ(fake_device::on_host<int64_t>(seen)[99], 3) << "rank " << comm->rank();
    });
  }
}

TEST(DeviceCheckpoint, a_box_is_read_into_a_tensor_of_the_device) {
  fake_device::install();
  Random random(5);
  const Sample sample = random_sample(random, 12);
  const Scratch scratch;
  std::filesystem::create_directory(scratch / "at");
  const Checkpoint checkpoint = write_sample(system_files(), random, sample, scratch / "at", 3);
  BoxReader reader(system_files(), scratch / "at", checkpoint);
  for (const auto& [name, tensor] : sample.tensors) {
    const at::Tensor there = at::empty(tensor.sizes(), fake_device::options(tensor.scalar_type()));
    reader.read(name, whole_box(tensor.sizes().vec()), there);
    EXPECT_EQ(bytes_in(there.to(at::kCPU)), bytes_in(tensor)) << name;
  }
}

}  // namespace
}  // namespace shardproof::checkpoint
