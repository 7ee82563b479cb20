// The bodies of fmt, from the headers that torch ships: see LibTorch.cmake.
#include <fmt/format-inl.h>

// Those that format.h declares to be elsewhere.
FMT_BEGIN_NAMESPACE
namespace detail {
template FMT_API auto thousands_sep_impl<char>(locale_ref) -> thousands_sep_result<char>;
template FMT_API auto decimal_point_impl<char>(locale_ref) -> char;
}  // namespace detail
FMT_END_NAMESPACE
