//! Common divisors and multiples of numbers.

/// Returns the greatest common divisor of two numbers that are not both 0.
pub(crate) fn gcd(mut a: u64, mut b: u64) -> u64 {
    while b != 0 {
        (a, b) = (b, a % b);
    }
    a
}

/// Returns the least common multiple of two numbers that are not both 0; `u64::MAX`, which no range
/// reaches, if it does not fit in a u64.
pub(crate) fn lcm(a: u64, b: u64) -> u64 {
    (a / gcd(a, b)).saturating_mul(b)
}
