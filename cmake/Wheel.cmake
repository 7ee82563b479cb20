# What `pip install .` and ci/wheel put into the Python package: the extension modules, the library, and the command with what
# it needs. Libraries are found beside each other, and torch's where pip has it.
set(_files shardproof_python shardproof_python_cuda
  shardproof shardproof_mpi shardproof_nccl shardproof_cuda golden golden_python harness)
foreach(part shardproof_python_mpi shardproof_cuda_graph)
  if(TARGET ${part})
    list(APPEND _files ${part})
  endif()
endforeach()
set_target_properties(${_files} PROPERTIES INSTALL_RPATH "$ORIGIN;$ORIGIN/../torch/lib;${SHARDPROOF_TORCH_DIR}/lib"
  INSTALL_RPATH_USE_LINK_PATH ON)
set_target_properties(shardproof_command PROPERTIES
  INSTALL_RPATH "$ORIGIN/..;$ORIGIN/../../torch/lib;${SHARDPROOF_TORCH_DIR}/lib" INSTALL_RPATH_USE_LINK_PATH ON)
install(TARGETS ${_files} LIBRARY DESTINATION shardproof COMPONENT python)
install(FILES "${CMAKE_BINARY_DIR}/python/shardproof/_built_for.py" DESTINATION shardproof COMPONENT python)
install(TARGETS shardproof_command RUNTIME DESTINATION shardproof/bin COMPONENT python)
add_custom_target(shardproof_package DEPENDS ${_files} shardproof_command)
