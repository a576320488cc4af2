// e^x and what is made of it. Included inside a code path's namespace.

// e^x to about an ulp: x = n ln 2 + r with |r| <= ln 2 / 2, ln 2 in two parts (Cody and Waite 1980), a polynomial for
// e^r. NaN stays NaN, e^0 is exactly 1, and nothing is below e^-87.3: a result under the smallest normal number would cost
// the processor more than all the rest.
INLINE f exp(f x) {
  // the constant is the second operand's role of min and max: they give their second operand where one is NaN
  const f bounded = max(set1(-87.3f), min(set1(88.72283f), x));
  const f n = round_even(mul(bounded, set1(1.44269504f)));
  f r = fnma(n, set1(0.693359375f), bounded);
  r = fnma(n, set1(-2.12194440e-4f), r);
  f p = set1(1.9875691500e-4f);  // Cephes expf (Moshier 1992)
  p = fma(p, r, set1(1.3981999507e-3f));
  p = fma(p, r, set1(8.3334519073e-3f));
  p = fma(p, r, set1(4.1665795894e-2f));
  p = fma(p, r, set1(1.6666665459e-1f));
  p = fma(p, r, set1(5.0000001201e-1f));
  p = fma(p, mul(r, r), r);
  return scale2(add(p, set1(1.0f)), n);
}

INLINE f tanh(f x) {
  // 1 - 2 / (e^2x + 1) loses digits near 0, where a caller adds 1 or multiplies by a cap: both absolute, so it may
  const f e = exp(add(x, x));
  return sub(set1(1.0f), div(set1(2.0f), add(e, set1(1.0f))));
}
