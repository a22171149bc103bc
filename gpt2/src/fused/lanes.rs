//! Sums and maxima of a row, in as many partial results as make the loop vector code. Their number is fixed, because the order of
//! additions decides the last bit.

/// Number of partial results.
pub(super) const LANES: usize = 16;

#[inline(always)]
pub(super) fn sum(row: &[f32], term: impl Fn(f32) -> f32) -> f32 {
    let mut lanes = [0.0f32; LANES];
    let (chunks, rest) = row.as_chunks::<LANES>();
    for chunk in chunks {
        for (lane, x) in lanes.iter_mut().zip(chunk) {
            *lane += term(*x);
        }
    }
    lanes.iter().sum::<f32>() + rest.iter().map(|x| term(*x)).sum::<f32>()
}

/// Replaces each element by `map` of it; the sum of all.
#[inline(always)]
pub(super) fn map_and_sum(row: &mut [f32], map: impl Fn(f32) -> f32) -> f32 {
    let mut lanes = [0.0f32; LANES];
    let (chunks, rest) = row.as_chunks_mut::<LANES>();
    for chunk in chunks {
        for (lane, x) in lanes.iter_mut().zip(chunk) {
            *x = map(*x);
            *lane += *x;
        }
    }
    let mut tail = 0.0;
    for x in rest {
        *x = map(*x);
        tail += *x;
    }
    lanes.iter().sum::<f32>() + tail
}

/// The largest element; which of them where some are not numbers, is not said.
#[inline(always)]
pub(super) fn max(row: &[f32]) -> f32 {
    let mut lanes = [f32::NEG_INFINITY; LANES];
    let (chunks, rest) = row.as_chunks::<LANES>();
    for chunk in chunks {
        for (lane, x) in lanes.iter_mut().zip(chunk) {
            *lane = if *x > *lane { *x } else { *lane };
        }
    }
    rest.iter().chain(&lanes).fold(f32::NEG_INFINITY, |a, b| a.max(*b))
}

/// Σ a·b.
#[inline(always)]
pub(super) fn dot(a: &[f32], b: &[f32]) -> f32 {
    let mut lanes = [0.0f32; LANES];
    let ((a, a_rest), (b, b_rest)) = (a.as_chunks::<LANES>(), b.as_chunks::<LANES>());
    for (a, b) in a.iter().zip(b) {
        for (lane, (a, b)) in lanes.iter_mut().zip(a.iter().zip(b)) {
            *lane += a * b;
        }
    }
    lanes.iter().sum::<f32>() + a_rest.iter().zip(b_rest).map(|(a, b)| a * b).sum::<f32>()
}

/// Σ a·b and Σ a·b·c.
#[inline(always)]
pub(super) fn two_sums(a: &[f32], b: &[f32], c: &[f32]) -> (f32, f32) {
    let (mut first, mut second) = ([0.0f32; LANES], [0.0f32; LANES]);
    let (a, a_rest) = a.as_chunks::<LANES>();
    let (b, b_rest) = b.as_chunks::<LANES>();
    let (c, c_rest) = c.as_chunks::<LANES>();
    for ((a, b), c) in a.iter().zip(b).zip(c) {
        for lane in 0..LANES {
            let product = a[lane] * b[lane];
            first[lane] += product;
            second[lane] += product * c[lane];
        }
    }
    let (mut one, mut two) = (first.iter().sum::<f32>(), second.iter().sum::<f32>());
    for ((a, b), c) in a_rest.iter().zip(b_rest).zip(c_rest) {
        one += a * b;
        two += a * b * c;
    }
    (one, two)
}

#[inline(always)]
pub(super) fn add(total: &mut [f32], part: &[f32]) {
    for (total, part) in total.iter_mut().zip(part) {
        *total += part;
    }
}
