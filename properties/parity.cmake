# Scenarios of the peers' own tests; docs/parity.md has the list.
shardproof_test(NAME parity_props LABEL train TORCH SOURCES
  sharding/training_props.cpp sharding/histories_props.cpp sharding/loss_chunks_props.cpp
  sharding/collectives_props.cpp sharding/prefetch_props.cpp sharding/init_props.cpp
  sharding/parameters_props.cpp
  sharding/precision_props.cpp sharding/casts_props.cpp sharding/autograd_props.cpp
  sharding/meshes_props.cpp sharding/units_props.cpp sharding/buffers_props.cpp
  sharding/wire_props.cpp sharding/rows_props.cpp sharding/passes_props.cpp
  sharding/hand_over_props.cpp
  sharding/aliases_props.cpp
  kit/parity_models.cpp kit/parity_training.cpp kit/toy_modules.cpp)
shardproof_test(NAME module_watch_props LABEL train TORCH SOURCES sharding/module_watch_props.cpp
  kit/parity_models.cpp kit/parity_training.cpp kit/toy_modules.cpp)
shardproof_test(NAME unit_options_props LABEL train TORCH SOURCES sharding/unit_options_props.cpp
  kit/parity_models.cpp kit/parity_training.cpp kit/toy_modules.cpp)
