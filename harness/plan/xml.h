// Text inside of XML, as pictures and JUnit's reports have it.
#pragma once

#include <string>

namespace harness {

// On one line, with what XML would take for markup or refuse written otherwise (base/escape.h).
std::string xml_text(const std::string& text);

}  // namespace harness
