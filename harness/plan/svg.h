// A picture of rectangles, lines and words, as a file that browsers and editors open.
#pragma once

#include <string>

namespace harness {

class Svg {
 public:
  Svg(double width, double height) : width_(width), height_(height) {}

  void rectangle(double x, double y, double width, double height, const std::string& fill);
  // A frame of one pixel.
  void frame(double x, double y, double width, double height, const std::string& color);
  // `dashes`: lengths of dashes and gaps, as in stroke-dasharray; "" draws a whole line.
  void line(double x, double y, double to_x, double to_y, const std::string& color, const std::string& dashes = "");
  // A filled circle around that point. `about` appears where the pointer rests on it; "" says nothing.
  void dot(double x, double y, const std::string& color, const std::string& about = "");
  // `anchor`: start, middle or end, of the words at x.
  void words(double x, double y, const std::string& text, double size = 11, const char* anchor = "start");

  std::string str() const;

 private:
  double width_, height_;
  std::string body_;
};

}  // namespace harness
