// A picture of rectangles and words, as a file that browsers and editors open.
#pragma once

#include <string>

namespace harness {

class Svg {
 public:
  Svg(double width, double height) : width_(width), height_(height) {}

  // `about` appears where the pointer rests on it; "" says nothing.
  void rectangle(double x, double y, double width, double height, const std::string& fill, const std::string& about = "");
  // A frame of one pixel.
  void frame(double x, double y, double width, double height, const std::string& color);
  // `anchor`: start, middle or end, of the words at x.
  void words(double x, double y, const std::string& text, double size = 11, const char* anchor = "start");

  std::string str() const;
  // Throws Error when the file cannot be written.
  void write(const std::string& path) const;

 private:
  double width_, height_;
  std::string body_;
};

}  // namespace harness
