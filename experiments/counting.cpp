/* Counts the arithmetic of experiments/yardstick.c: the same source with numbers that count.
 *
 * An addition to zero, which begins a sum, is not counted. Comparisons, signs and absolute
 * values are no arithmetic here.
 */
#include <math.h>

static long additions, products, divisions, roots;

struct Number {
    double value;
    Number() = default;
    Number(double x) : value(x) {}
    bool zero() const { return value == 0; }
};

static Number operator+(Number x, Number y) {
    additions += !(x.zero() || y.zero());
    return x.value + y.value;
}
static Number operator-(Number x, Number y) {
    additions += !(x.zero() || y.zero());
    return x.value - y.value;
}
static Number operator*(Number x, Number y) { products++; return x.value * y.value; }
static Number operator/(Number x, Number y) { divisions++; return x.value / y.value; }
static Number operator-(Number x) { return -x.value; }
static Number sqrt(Number x) { roots++; return sqrt(x.value); }
static Number fabs(Number x) { return fabs(x.value); }
static void operator+=(Number &x, Number y) { x = x + y; }
static void operator-=(Number &x, Number y) { x = x - y; }
static void operator*=(Number &x, Number y) { x = x * y; }
static bool operator<(Number x, Number y) { return x.value < y.value; }
static bool operator>(Number x, Number y) { return x.value > y.value; }
static bool operator<=(Number x, Number y) { return x.value <= y.value; }

#define restrict __restrict
#define double Number
extern "C" {
#include "yardstick.c"
#undef double

/* Additions, products, divisions and roots since the library was loaded. */
void counted(double *found) {
    found[0] = additions;
    found[1] = products;
    found[2] = divisions;
    found[3] = roots;
}
}
