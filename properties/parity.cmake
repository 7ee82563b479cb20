# Scenarios of the peers' own tests; docs/parity.md has the list.
shardproof_test(NAME parity_props LABEL train TORCH SOURCES
  parity_fsdp2_training_props.cpp parity_fsdp2_histories_props.cpp parity_fsdp2_chunks_props.cpp
  parity_fsdp2_comm_props.cpp parity_fsdp2_prefetch_props.cpp parity_fsdp2_init_props.cpp
  parity_fsdp2_parameters_props.cpp
  parity_fsdp2_precision_props.cpp parity_fsdp2_casts_props.cpp parity_fsdp2_autograd_props.cpp
  parity_megatron_props.cpp parity_megatron_units_props.cpp parity_megatron_buffers_props.cpp
  parity_megatron_wire_props.cpp
  parity_fsdp2_aliases_props.cpp
  parity_models.cpp parity_training.cpp toy_modules.cpp)
