//! The kernels themselves. A cube, a group of threads that share memory, works on one row at a time; each of its units takes every
//! `UNITS`-th element, so that neighbours read neighbours. Arithmetic is f32 whatever the tensors hold.

use burn_cubecl::cubecl;
use burn_cubecl::cubecl::prelude::*;

use crate::dropout::{INCREMENTS, MULTIPLIERS, ROUNDS};

/// Units of a cube: a power of two. Part of the result, since sums are over what each of them has.
pub(super) const UNITS: usize = 128;
/// Halvings from all units to one.
const STEPS: usize = UNITS.ilog2() as usize;

/// Nothing is smaller; minus infinity is no constant of every shading language.
const LEAST: f32 = -3.0e38;

/// √(2/π) of GELU's tanh form, doubled: x·(1 + tanh u)/2 = x / (1 + e^−2u).
const TWICE_ROOT: f32 = 1.595_769;
const CUBIC: f32 = 0.044_715;

/// What the cube's units have, in a tree, the same in each of them: the largest of it, or else its sum.
#[cube]
fn together(value: f32, scratch: &mut Shared<[f32]>, #[comptime] largest: bool) -> f32 {
    let unit = UNIT_POS as usize;
    scratch[unit] = value;
    sync_cube();
    #[unroll]
    for step in 0..STEPS {
        let half = comptime!(UNITS >> (step + 1));
        if unit < half {
            let (own, other) = (scratch[unit], scratch[unit + half]);
            scratch[unit] = if comptime!(largest) { max(own, other) } else { own + other };
        }
        sync_cube();
    }
    let all = scratch[0];
    // No unit writes before all have read.
    sync_cube();
    all
}

/// Σ over the cube's units.
#[cube]
fn total(value: f32, scratch: &mut Shared<[f32]>) -> f32 {
    together(value, scratch, false)
}

/// The largest of what the cube's units have.
#[cube]
fn largest(value: f32, scratch: &mut Shared<[f32]>) -> f32 {
    together(value, scratch, true)
}

/// Row i of `scores`, whose rows are those of squares `[t, t]`, becomes the softmax of `scale` times its first i + 1 elements, and zeros.
#[cube(launch, address_type = "dynamic")]
pub(super) fn causal_softmax<F: Float>(scores: &mut Tensor<F>, scale: f32, #[define(F)] _dtype: ElemType) {
    let row = CUBE_POS;
    if row >= scores.shape(0) {
        terminate!();
    }
    let t = scores.shape(1);
    let (start, seen) = (row * scores.stride(0), row % t + 1);
    let mut scratch = Shared::<[f32]>::new_slice(UNITS);

    let mut high = f32::new(LEAST);
    let mut i = UNIT_POS as usize;
    while i < seen {
        high = max(high, f32::cast_from(scores[start + i]) * scale);
        i += UNITS;
    }
    let high = largest(high, &mut scratch);

    let mut sum = f32::new(0.0);
    let mut i = UNIT_POS as usize;
    while i < seen {
        sum += (f32::cast_from(scores[start + i]) * scale - high).exp();
        i += UNITS;
    }
    let factor = f32::new(1.0) / total(sum, &mut scratch);

    let mut i = UNIT_POS as usize;
    while i < t {
        let mut value = f32::new(0.0);
        if i < seen {
            value = (f32::cast_from(scores[start + i]) * scale - high).exp() * factor;
        }
        scores[start + i] = F::cast_from(value);
        i += UNITS;
    }
}

/// The gradient with respect to what [`causal_softmax`] got, in place of that with respect to what it made, `weights`:
/// `scale` · w · (g − Σ g·w).
#[cube(launch, address_type = "dynamic")]
pub(super) fn causal_softmax_backward<F: Float>(
    gradients: &mut Tensor<F>,
    weights: &Tensor<F>,
    scale: f32,
    #[define(F)] _dtype: ElemType,
) {
    let row = CUBE_POS;
    if row >= gradients.shape(0) {
        terminate!();
    }
    let t = gradients.shape(1);
    let (start, weight_start, seen) = (row * gradients.stride(0), row * weights.stride(0), row % t + 1);
    let mut scratch = Shared::<[f32]>::new_slice(UNITS);

    let mut sum = f32::new(0.0);
    let mut i = UNIT_POS as usize;
    while i < seen {
        sum += f32::cast_from(gradients[start + i]) * f32::cast_from(weights[weight_start + i]);
        i += UNITS;
    }
    let mean = total(sum, &mut scratch);

    let mut i = UNIT_POS as usize;
    while i < t {
        let mut value = f32::new(0.0);
        if i < seen {
            let weight = f32::cast_from(weights[weight_start + i]);
            value = weight * (f32::cast_from(gradients[start + i]) - mean) * scale;
        }
        gradients[start + i] = F::cast_from(value);
        i += UNITS;
    }
}

/// Each row of `x` less its mean, over its standard deviation, times `weight` plus `bias`. Row r of `stats` becomes that mean and the
/// inverse of that deviation.
#[cube(launch, address_type = "dynamic")]
pub(super) fn layer_norm<F: Float>(
    x: &Tensor<F>,
    weight: &Tensor<F>,
    bias: &Tensor<F>,
    y: &mut Tensor<F>,
    stats: &mut Tensor<f32>,
    epsilon: f32,
    #[define(F)] _dtype: ElemType,
) {
    let row = CUBE_POS;
    if row >= x.shape(0) {
        terminate!();
    }
    let c = x.shape(1);
    let (x_start, y_start) = (row * x.stride(0), row * y.stride(0));
    let mut scratch = Shared::<[f32]>::new_slice(UNITS);

    let mut sum = f32::new(0.0);
    let mut i = UNIT_POS as usize;
    while i < c {
        sum += f32::cast_from(x[x_start + i]);
        i += UNITS;
    }
    let mean = total(sum, &mut scratch) / f32::cast_from(c);

    let mut sum = f32::new(0.0);
    let mut i = UNIT_POS as usize;
    while i < c {
        let distance = f32::cast_from(x[x_start + i]) - mean;
        sum += distance * distance;
        i += UNITS;
    }
    let variance = total(sum, &mut scratch) / f32::cast_from(c);
    let inverse = f32::new(1.0) / (variance + epsilon).sqrt();

    let mut i = UNIT_POS as usize;
    while i < c {
        let normal = (f32::cast_from(x[x_start + i]) - mean) * inverse;
        y[y_start + i] = F::cast_from(normal * f32::cast_from(weight[i]) + f32::cast_from(bias[i]));
        i += UNITS;
    }
    if UNIT_POS == 0 {
        stats[2 * row] = mean;
        stats[2 * row + 1] = inverse;
    }
}

/// With x̂ the normalised row and ĝ = g·w: g becomes (ĝ − mean(ĝ) − x̂·mean(ĝ·x̂)) / σ. Cube k takes rows k, k + K, …, of which it leaves
/// Σ g·x̂ in row k of `sums`, and Σ g in row K + k; until the end it keeps them in memory of its own, if that `held` as many as a row has.
#[cube(launch, address_type = "dynamic")]
pub(super) fn layer_norm_backward<F: Float>(
    gradients: &mut Tensor<F>,
    x: &Tensor<F>,
    weight: &Tensor<F>,
    stats: &Tensor<f32>,
    sums: &mut Tensor<f32>,
    #[comptime] held: usize,
    #[define(F)] _dtype: ElemType,
) {
    let cube = CUBE_POS;
    let cubes = sums.shape(0) / 2;
    if cube >= cubes {
        terminate!();
    }
    let (rows, c) = (x.shape(0), x.shape(1));
    let (dw_start, db_start) = (cube * c, (cubes + cube) * c);
    let mut scratch = Shared::<[f32]>::new_slice(UNITS);

    // Each element is one unit's alone, so no barrier is needed. At least one, since no memory can be of no elements.
    let mut dw = Shared::<[f32]>::new_slice(comptime!(held.max(1)));
    let mut db = Shared::<[f32]>::new_slice(comptime!(held.max(1)));

    let mut i = UNIT_POS as usize;
    while i < c {
        if comptime!(held > 0) {
            dw[i] = f32::new(0.0);
            db[i] = f32::new(0.0);
        } else {
            sums[dw_start + i] = f32::new(0.0);
            sums[db_start + i] = f32::new(0.0);
        }
        i += UNITS;
    }
    let mut row = cube;
    while row < rows {
        let (g_start, x_start) = (row * gradients.stride(0), row * x.stride(0));
        let (mean, inverse) = (stats[2 * row], stats[2 * row + 1]);
        let mut along = f32::new(0.0);
        let mut across = f32::new(0.0);
        let mut i = UNIT_POS as usize;
        while i < c {
            let gradient = f32::cast_from(gradients[g_start + i]);
            let normal = (f32::cast_from(x[x_start + i]) - mean) * inverse;
            if comptime!(held > 0) {
                let (dw_sum, db_sum) = (dw[i] + gradient * normal, db[i] + gradient);
                dw[i] = dw_sum;
                db[i] = db_sum;
            } else {
                sums[dw_start + i] += gradient * normal;
                sums[db_start + i] += gradient;
            }
            let weighted = gradient * f32::cast_from(weight[i]);
            along += weighted;
            across += weighted * normal;
            i += UNITS;
        }
        let along = total(along, &mut scratch) / f32::cast_from(c);
        let across = total(across, &mut scratch) / f32::cast_from(c);
        let mut i = UNIT_POS as usize;
        while i < c {
            let weighted = f32::cast_from(gradients[g_start + i]) * f32::cast_from(weight[i]);
            let normal = (f32::cast_from(x[x_start + i]) - mean) * inverse;
            gradients[g_start + i] = F::cast_from((weighted - along - normal * across) * inverse);
            i += UNITS;
        }
        row += cubes;
    }
    if comptime!(held > 0) {
        let mut i = UNIT_POS as usize;
        while i < c {
            sums[dw_start + i] = dw[i];
            sums[db_start + i] = db[i];
            i += UNITS;
        }
    }
}

/// What GELU multiplies its input with.
#[cube]
fn gate(x: f32) -> f32 {
    let one = f32::new(1.0);
    one / (one + (x * f32::new(-TWICE_ROOT) * (one + f32::new(CUBIC) * x * x)).exp())
}

/// GELU in its tanh form, row by row.
#[cube(launch, address_type = "dynamic")]
pub(super) fn gelu<F: Float>(x: &Tensor<F>, y: &mut Tensor<F>, #[define(F)] _dtype: ElemType) {
    let row = CUBE_POS;
    if row >= x.shape(0) {
        terminate!();
    }
    let (x_start, y_start) = (row * x.stride(0), row * y.stride(0));
    let mut i = UNIT_POS as usize;
    while i < x.shape(1) {
        let value = f32::cast_from(x[x_start + i]);
        y[y_start + i] = F::cast_from(value * gate(value));
        i += UNITS;
    }
}

/// The gradient with respect to GELU's input `x`, in place of that with respect to its output.
#[cube(launch, address_type = "dynamic")]
pub(super) fn gelu_backward<F: Float>(gradients: &mut Tensor<F>, x: &Tensor<F>, #[define(F)] _dtype: ElemType) {
    let row = CUBE_POS;
    if row >= x.shape(0) {
        terminate!();
    }
    let (g_start, x_start) = (row * gradients.stride(0), row * x.stride(0));
    let one = f32::new(1.0);
    let mut i = UNIT_POS as usize;
    while i < x.shape(1) {
        let value = f32::cast_from(x[x_start + i]);
        let open = gate(value);
        let slope = f32::new(TWICE_ROOT) * (one + f32::new(3.0 * CUBIC) * value * value);
        let gradient = f32::cast_from(gradients[g_start + i]);
        gradients[g_start + i] = F::cast_from(gradient * (open + value * open * (one - open) * slope));
        i += UNITS;
    }
}

/// What decides which elements are dropped: see the [host's](crate::dropout).
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub(super) struct DropoutScalars {
    pub(super) key_0: u32,
    pub(super) key_1: u32,
    pub(super) first: u32,
    pub(super) layer: u32,
    pub(super) step: u32,
    pub(super) threshold: u32,
    pub(super) factor: f32,
}

const MULTIPLIER_0: i64 = MULTIPLIERS[0] as i64;
const MULTIPLIER_1: i64 = MULTIPLIERS[1] as i64;
const INCREMENT_0: i64 = INCREMENTS[0] as i64;
const INCREMENT_1: i64 = INCREMENTS[1] as i64;

/// `value` times the factor, or times zero where the word says that it is dropped: as everywhere else, infinities and NaN become NaN there.
#[cube]
fn kept<F: Float>(value: F, word: u32, threshold: u32, factor: f32) -> F {
    let mut times = f32::new(0.0);
    if word >= threshold {
        times = factor;
    }
    F::cast_from(f32::cast_from(value) * times)
}

/// Each element times its factor, in place. A sequence has so many `lines`; each unit takes four elements at a time.
#[cube(launch, address_type = "dynamic")]
pub(super) fn dropout<F: Float>(
    values: &mut Tensor<F>,
    lines: usize,
    scalars: DropoutScalars,
    #[define(F)] _dtype: ElemType,
) {
    let row = CUBE_POS;
    if row >= values.shape(0) {
        terminate!();
    }
    let (start, width) = (row * values.stride(0), values.shape(1));
    let counters = width.div_ceil(4);
    let begin = u32::cast_from(row % lines * counters);
    let sequence = scalars.first + u32::cast_from(row / lines);
    let mut counter = UNIT_POS as usize;
    while counter < counters {
        let mut a = begin + u32::cast_from(counter);
        let mut b = sequence;
        let mut c = scalars.layer;
        let mut d = scalars.step;
        let mut key_0 = scalars.key_0;
        let mut key_1 = scalars.key_1;
        #[unroll]
        for _round in 0..ROUNDS {
            let first_high = a.mul_hi(u32::new(MULTIPLIER_0));
            let first_low = a * u32::new(MULTIPLIER_0);
            let second_high = c.mul_hi(u32::new(MULTIPLIER_1));
            let second_low = c * u32::new(MULTIPLIER_1);
            a = second_high ^ b ^ key_0;
            b = second_low;
            c = first_high ^ d ^ key_1;
            d = first_low;
            key_0 += u32::new(INCREMENT_0);
            key_1 += u32::new(INCREMENT_1);
        }
        let (at, left) = (start + 4 * counter, width - 4 * counter);
        values[at] = kept::<F>(values[at], a, scalars.threshold, scalars.factor);
        if left > 1 {
            values[at + 1] = kept::<F>(values[at + 1], b, scalars.threshold, scalars.factor);
        }
        if left > 2 {
            values[at + 2] = kept::<F>(values[at + 2], c, scalars.threshold, scalars.factor);
        }
        if left > 3 {
            values[at + 3] = kept::<F>(values[at + 3], d, scalars.threshold, scalars.factor);
        }
        counter += UNITS;
    }
}

/// `losses` become −ln softmax(row)[target], of the first `v` elements of each row; and with `differentiate` these become (softmax − one-hot) ·
/// `row_scale`, and the others zero.
#[cube(launch, address_type = "dynamic")]
pub(super) fn cross_entropy<F: Float, I: Int>(
    logits: &mut Tensor<F>,
    targets: &Tensor<I>,
    losses: &mut Tensor<f32>,
    v: usize,
    row_scale: f32,
    #[comptime] differentiate: bool,
    #[define(F, I)] _dtypes: [ElemType; 2],
) {
    let row = CUBE_POS;
    if row >= logits.shape(0) {
        terminate!();
    }
    let start = row * logits.stride(0);
    let target = u32::cast_from(targets[row]) as usize;
    let mut scratch = Shared::<[f32]>::new_slice(UNITS);

    // Each unit keeps the largest so far, and the sum of exponentials relative to it, so one pass gives both.
    let mut high = f32::new(LEAST);
    let mut sum = f32::new(0.0);
    let mut i = UNIT_POS as usize;
    while i < v {
        let value = f32::cast_from(logits[start + i]);
        if value > high {
            sum = sum * (high - value).exp() + f32::new(1.0);
            high = value;
        } else {
            sum += (value - high).exp();
        }
        i += UNITS;
    }
    let row_high = largest(high, &mut scratch);
    let row_sum = total(sum * (high - row_high).exp(), &mut scratch);
    if UNIT_POS == 0 {
        losses[row] = row_sum.ln() + row_high - f32::cast_from(logits[start + target]);
    }
    if comptime!(differentiate) {
        // Not before the first unit has read the target's.
        sync_cube();
        let factor = row_scale / row_sum;
        let mut i = UNIT_POS as usize;
        while i < v {
            let mut value = (f32::cast_from(logits[start + i]) - row_high).exp() * factor;
            if i == target {
                value -= row_scale;
            }
            logits[start + i] = F::cast_from(value);
            i += UNITS;
        }
        let mut i = v + UNIT_POS as usize;
        while i < logits.shape(1) {
            logits[start + i] = F::cast_from(0.0f32);
            i += UNITS;
        }
    }
}

/// What a step of AdamW does with all elements alike: see the [host's](crate::optim::AdamW).
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub(super) struct AdamWScalars {
    pub(super) grad_factor: f32,
    pub(super) mean_weight: f32,
    pub(super) square_decay: f32,
    pub(super) square_weight: f32,
    pub(super) root_correction: f32,
    pub(super) epsilon: f32,
    pub(super) step_size: f32,
    pub(super) keep: f32,
}

/// One step for `count` elements, those from `at` on of `params`, `means` and `squares`, whose gradients are those from `from` on. The new
/// parameters are `updated`: the old ones may be the weights that the model has.
#[cube(launch, address_type = "dynamic")]
pub(super) fn adamw<F: Float>(
    params: &Tensor<f32>,
    updated: &mut Tensor<f32>,
    means: &mut Tensor<f32>,
    squares: &mut Tensor<f32>,
    gradients: &Tensor<F>,
    at: usize,
    from: usize,
    count: usize,
    scalars: AdamWScalars,
    #[define(F)] _dtype: ElemType,
) {
    let mut i = ABSOLUTE_POS;
    while i < count {
        let gradient = f32::cast_from(gradients[from + i]) * scalars.grad_factor;
        let old = means[at + i];
        let mean = old + scalars.mean_weight * (gradient - old);
        let square = squares[at + i] * scalars.square_decay + scalars.square_weight * gradient * gradient;
        means[at + i] = mean;
        squares[at + i] = square;
        let denominator = square.sqrt() / scalars.root_correction + scalars.epsilon;
        let kept = params[at + i] * scalars.keep;
        updated[at + i] = kept - scalars.step_size * (mean / denominator);
        i += CUBE_COUNT * UNITS;
    }
}

/// Element `slot` + k of `sums` becomes Σ (`unscale` · v)² over the values that cube k takes.
#[cube(launch, address_type = "dynamic")]
pub(super) fn sum_of_squares<F: Float>(
    values: &Tensor<F>,
    sums: &mut Tensor<f32>,
    slot: usize,
    unscale: f32,
    #[define(F)] _dtype: ElemType,
) {
    let mut scratch = Shared::<[f32]>::new_slice(UNITS);
    let mut sum = f32::new(0.0);
    let mut i = ABSOLUTE_POS;
    while i < values.len() {
        let value = f32::cast_from(values[i]) * unscale;
        sum += value * value;
        i += CUBE_COUNT * UNITS;
    }
    let sum = total(sum, &mut scratch);
    if UNIT_POS == 0 {
        sums[slot + CUBE_POS] = sum;
    }
}
