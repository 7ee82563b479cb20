# `cmake --install build --prefix DIR`: the library, its headers, and what find_package(shardproof) needs. LibTorch stays
# where it is: the environment that this build used, or another that the user names by SHARDPROOF_VENV.
include(GNUInstallDirs)
include(CMakePackageConfigHelpers)

set(_package "${CMAKE_INSTALL_LIBDIR}/cmake/shardproof")
set(_libraries shardproof shardproof_mpi shardproof_nccl shardproof_cuda)
set_target_properties(${_libraries} PROPERTIES INSTALL_RPATH "$ORIGIN;${SHARDPROOF_TORCH_DIR}/lib"
  INSTALL_RPATH_USE_LINK_PATH ON)
foreach(part mpi nccl cuda)
  set_target_properties(shardproof_${part} PROPERTIES EXPORT_NAME ${part})
endforeach()
target_compile_features(shardproof INTERFACE cxx_std_20)

install(TARGETS ${_libraries} EXPORT shardproof LIBRARY DESTINATION "${CMAKE_INSTALL_LIBDIR}"
  INCLUDES DESTINATION "${CMAKE_INSTALL_INCLUDEDIR}")
install(DIRECTORY "${PROJECT_SOURCE_DIR}/impl/include/shardproof" DESTINATION "${CMAKE_INSTALL_INCLUDEDIR}")
install(EXPORT shardproof NAMESPACE shardproof:: FILE shardproofTargets.cmake DESTINATION "${_package}")
configure_package_config_file("${CMAKE_CURRENT_LIST_DIR}/shardproofConfig.cmake.in"
  "${CMAKE_BINARY_DIR}/shardproofConfig.cmake" INSTALL_DESTINATION "${_package}")
write_basic_package_version_file("${CMAKE_BINARY_DIR}/shardproofConfigVersion.cmake" COMPATIBILITY SameMinorVersion)
install(FILES "${CMAKE_BINARY_DIR}/shardproofConfig.cmake" "${CMAKE_BINARY_DIR}/shardproofConfigVersion.cmake"
  "${CMAKE_CURRENT_LIST_DIR}/LibTorch.cmake" DESTINATION "${_package}")
