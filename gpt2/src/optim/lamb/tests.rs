use super::*;
use crate::config::Preset;
use crate::init;
use crate::segments::layout;

const CONFIG: AdamWConfig = AdamWConfig { beta1: 0.9, beta2: 0.999, epsilon: 1e-6, weight_decay: 0.01 };

fn block() -> SegmentInfo {
    layout(&Preset::Micro.config(61)).unwrap().swap_remove(1)
}

fn gradients(segment: &SegmentInfo, steps: u64) -> Vec<Vec<f32>> {
    // Tensors differ in scale by orders of magnitude, which is what trust ratios are for.
    let scales = |path: &str| if path.contains("mlp") { 30.0 } else { 0.02 };
    (0..steps)
        .map(|step| {
            let of = |info: &crate::segments::ParamInfo| init::normal(step, &info.path, info.len, scales(&info.path));
            segment.params.iter().flat_map(of).collect()
        })
        .collect()
}

fn start(segment: &SegmentInfo) -> Vec<f32> {
    let mut params = init::normal(9, "params", segment.len, 0.5);
    // A new model's biases are zero: their norm must not stop them.
    for info in segment.params.iter().filter(|info| info.path.ends_with("bias")) {
        params[info.offset..info.offset + info.len].fill(0.0);
    }
    params
}

/// Algorithm 2 of the paper, tensor by tensor in f64.
fn reference(segment: &SegmentInfo, config: AdamWConfig, grads: &[Vec<f32>], lr: f64, factor: f64) -> Vec<f64> {
    let mut x: Vec<f64> = start(segment).into_iter().map(f64::from).collect();
    let (mut m, mut v) = (vec![0.0; segment.len], vec![0.0; segment.len]);
    for (step, grad) in grads.iter().enumerate() {
        let t = step as i32 + 1;
        for tensor in &segment.params {
            let of = tensor.offset..tensor.offset + tensor.len;
            let decays = tensor.shape.len() == 2;
            let mut update = Vec::new();
            for i in of.clone() {
                let g = f64::from(grad[i]) * factor;
                m[i] = config.beta1 * m[i] + (1.0 - config.beta1) * g;
                v[i] = config.beta2 * v[i] + (1.0 - config.beta2) * g * g;
                let m_hat = m[i] / (1.0 - config.beta1.powi(t));
                let v_hat = v[i] / (1.0 - config.beta2.powi(t));
                let r = m_hat / (v_hat.sqrt() + config.epsilon);
                update.push(if decays { r + config.weight_decay * x[i] } else { r });
            }
            let norm = |values: &[f64]| values.iter().map(|value| value * value).sum::<f64>().sqrt();
            let (of_x, of_update) = (norm(&x[of.clone()]), norm(&update));
            let ratio = if decays && of_x > 0.0 && of_update > 0.0 { of_x / of_update } else { 1.0 };
            for (i, u) in of.zip(update) {
                x[i] -= lr * ratio * u;
            }
        }
    }
    x
}

/// The parameters after all steps where each shard has an optimizer and adds its norms to the others'.
fn sharded(segment: &SegmentInfo, config: AdamWConfig, grads: &[Vec<f32>], cuts: &[usize]) -> Vec<f32> {
    let mut params = start(segment);
    let ranges: Vec<Range<usize>> = cuts.windows(2).map(|ends| ends[0]..ends[1]).collect();
    let mut shards: Vec<Lamb> = ranges.iter().map(|range| Lamb::new(config, segment, range.clone()).unwrap()).collect();
    for grad in grads {
        let mut sums = vec![[0.0; 2]; segment.params.len()];
        for (shard, range) in shards.iter_mut().zip(&ranges) {
            let norms = shard.prepare(&params[range.clone()], &grad[range.clone()], 0.7).unwrap();
            for ((sum, part), info) in sums.iter_mut().zip(norms).zip(&segment.params) {
                let apart = info.offset >= range.end || info.offset + info.len <= range.start;
                assert!(!apart || part == [0.0; 2], "{} has nothing in {range:?}", info.path);
                *sum = [sum[0] + part[0], sum[1] + part[1]];
            }
        }
        for (shard, range) in shards.iter_mut().zip(&ranges) {
            shard.apply(&mut params[range.clone()], 1e-2, &sums).unwrap();
        }
    }
    params
}

fn largest_difference(params: &[f32], reference: &[f64]) -> f64 {
    assert_eq!(params.len(), reference.len());
    params.iter().zip(reference).map(|(p, r)| (f64::from(*p) - r).abs() / r.abs().max(1e-2)).fold(0.0, f64::max)
}

#[test]
fn steps_agree_with_the_algorithm_of_the_paper() {
    let segment = block();
    let grads = gradients(&segment, 5);
    for config in [CONFIG, AdamWConfig { weight_decay: 0.0, ..CONFIG }, AdamWConfig { weight_decay: 0.3, ..CONFIG }] {
        let expected = reference(&segment, config, &grads, 1e-2, f64::from(0.7f32));
        let mut whole = start(&segment);
        let mut lamb = Lamb::new(config, &segment, 0..segment.len).unwrap();
        for grad in &grads {
            lamb.step(&mut whole, grad, 1e-2, 0.7).unwrap();
        }
        let difference = largest_difference(&whole, &expected);
        assert!(difference < 2e-5, "{difference}");
        let moved = largest_difference(&start(&segment), &expected);
        assert!(moved > 0.01, "the tolerance is far below a step: {moved}");
    }
}

#[test]
fn shards_give_what_the_whole_gives() {
    let segment = block();
    let grads = gradients(&segment, 5);
    let n = segment.len;
    let whole = sharded(&segment, CONFIG, &grads, &[0, n]);
    assert_eq!(whole, sharded(&segment, CONFIG, &grads, &[0, n]), "the same sharding, the same bits");
    let exact: Vec<f64> = whole.iter().copied().map(f64::from).collect();
    for cuts in [vec![0, n / 2, n], vec![0, 1, 1, 37, 1000, n / 2 + 3, n], (0..8).map(|i| i * n / 7).collect()] {
        let params = sharded(&segment, CONFIG, &grads, &cuts);
        let difference = largest_difference(&params, &exact);
        assert!(difference < 1e-6, "{cuts:?}: {difference}");
    }
}

#[test]
fn a_matrix_moves_by_its_own_size_and_a_bias_as_by_adam() {
    let segment = block();
    let grads = gradients(&segment, 1);
    let before = start(&segment);
    let mut after = before.clone();
    let mut lamb = Lamb::new(AdamWConfig { weight_decay: 0.0, ..CONFIG }, &segment, 0..segment.len).unwrap();
    lamb.step(&mut after, &grads[0], 1e-3, 1.0).unwrap();
    for info in &segment.params {
        let of = info.offset..info.offset + info.len;
        let norm = |values: &mut dyn Iterator<Item = f32>| values.map(|x| f64::from(x).powi(2)).sum::<f64>().sqrt();
        let moved = norm(&mut of.clone().map(|i| after[i] - before[i]));
        let expected = match info.decay {
            true => 1e-3 * norm(&mut of.clone().map(|i| before[i])),
            // The first step of Adam is the sign of each gradient.
            false => 1e-3 * (info.len as f64).sqrt(),
        };
        assert!((moved / expected - 1.0).abs() < 1e-3, "{}: {moved} instead of {expected}", info.path);
    }
}

#[test]
fn zero_gradients_only_decay_matrices() {
    let segment = block();
    let before = start(&segment);
    let zeros = vec![0.0; segment.len];
    let mut after = before.clone();
    let mut lamb = Lamb::new(CONFIG, &segment, 0..segment.len).unwrap();
    lamb.step(&mut after, &zeros, 0.125, 1.0).unwrap();
    for info in &segment.params {
        // The update is λp, so its trust ratio is 1/λ.
        let keep = if info.decay { 0.875 } else { 1.0 };
        for i in info.offset..info.offset + info.len {
            assert!((after[i] - keep * before[i]).abs() <= 1e-6 * before[i].abs(), "{}: {}", info.path, after[i]);
        }
    }
    // Without decay there is no update at all, and nothing to divide by.
    let mut still = before.clone();
    let mut lamb = Lamb::new(AdamWConfig { weight_decay: 0.0, ..CONFIG }, &segment, 0..segment.len).unwrap();
    lamb.step(&mut still, &zeros, 0.125, 1.0).unwrap();
    assert_eq!(still, before);
    // A matrix of zeros moves like Adam's.
    let mut from_zero = vec![0.0; segment.len];
    let mut lamb = Lamb::new(CONFIG, &segment, 0..segment.len).unwrap();
    lamb.step(&mut from_zero, &vec![2.0; segment.len], 0.125, 1.0).unwrap();
    assert!(from_zero.iter().all(|p| (p + 0.125).abs() < 1e-5));
    assert_eq!(trust_ratio([4.0, 1.0]), 2.0);
    assert_eq!((trust_ratio([0.0, 1.0]), trust_ratio([1.0, 0.0])), (1.0, 1.0));
}

#[test]
fn no_error_loses_a_step() {
    let segment = block();
    let (n, tensors) = (segment.len, segment.params.len());
    let grads = gradients(&segment, 2);
    let mut params = start(&segment);
    let mut expected = params.clone();
    let mut undisturbed = Lamb::new(CONFIG, &segment, 0..n).unwrap();
    let mut lamb = undisturbed.clone();
    for (step, grad) in grads.iter().enumerate() {
        undisturbed.step(&mut expected, grad, 0.01, 1.0).unwrap();

        let error = lamb.apply(&mut params, 0.01, &vec![[1.0; 2]; tensors]).unwrap_err();
        assert!(matches!(error, OptimError::NotPrepared { .. }), "{error}");
        let error = lamb.prepare(&params[1..], grad, 1.0).unwrap_err();
        assert!(
            matches!(&error, OptimError::Length { len, expected, .. } if (*len, *expected) == (n - 1, n)),
            "{error}"
        );
        assert!(matches!(lamb.prepare(&params, &grad[1..], 1.0), Err(OptimError::Length { .. })));
        assert_eq!(lamb.steps(), step as u64);
        let norms = lamb.prepare(&params, grad, 1.0).unwrap();
        assert!(matches!(lamb.prepare(&params, grad, 1.0), Err(OptimError::AlreadyPrepared { .. })));
        assert!(matches!(lamb.step(&mut params, grad, 0.01, 1.0), Err(OptimError::AlreadyPrepared { .. })));
        assert!(matches!(lamb.apply(&mut params[1..], 0.01, &norms), Err(OptimError::Length { .. })));
        let error = lamb.apply(&mut params, 0.01, &norms[1..]).unwrap_err();
        assert!(error.to_string().contains(&format!("has {} elements, not {tensors}", tensors - 1)), "{error}");
        for bad in [f64::NAN, f64::INFINITY, -1.0] {
            let mut broken = norms.clone();
            broken[2][1] = bad;
            let error = lamb.apply(&mut params, 0.01, &broken).unwrap_err().to_string();
            assert!(error.contains("update of h.0.attn.c_attn.weight"), "{error}");
        }
        lamb.apply(&mut params, 0.01, &norms).unwrap();
        assert_eq!(lamb.steps(), step as u64 + 1);
        assert_eq!(params, expected);
    }
    let (mean, square, steps) = undisturbed.state();
    assert_eq!(lamb.state(), (mean, square, steps));
    lamb.prepare(&params, &grads[0], 1.0).unwrap();
    assert!(lamb.restore(vec![0.0; n], vec![], 2).is_err());
    lamb.restore(mean.to_vec(), square.to_vec(), steps).unwrap();
    lamb.step(&mut params, &grads[0], 0.01, 1.0).unwrap();
    undisturbed.step(&mut expected, &grads[0], 0.01, 1.0).unwrap();
    assert_eq!(params, expected);
}

#[test]
fn a_whole_step_of_a_part_of_a_matrix_is_refused() {
    let segment = block();
    let matrix = segment.params.iter().find(|info| info.decay).unwrap();
    let range = matrix.offset..matrix.offset + matrix.len - 1;
    let mut params = vec![1.0; range.len()];
    let grads = params.clone();
    let mut lamb = Lamb::new(CONFIG, &segment, range).unwrap();
    let error = lamb.step(&mut params, &grads, 0.1, 1.0).unwrap_err();
    assert!(matches!(&error, OptimError::Partial { tensor, .. } if *tensor == matrix.path), "{error}");
    assert_eq!((lamb.steps(), &params), (0, &grads));
    // A part of a bias has no trust ratio to share, and an empty shard nothing at all.
    let bias = segment.params.iter().find(|info| !info.decay).unwrap();
    let mut part = Lamb::new(CONFIG, &segment, bias.offset..bias.offset + 2).unwrap();
    part.step(&mut [1.0; 2], &[1.0; 2], 0.1, 1.0).unwrap();
    let mut empty = Lamb::new(CONFIG, &segment, 5..5).unwrap();
    assert!(empty.is_empty());
    empty.step(&mut [], &[], 0.1, 1.0).unwrap();
    assert!(Lamb::new(CONFIG, &segment, 0..segment.len + 1).is_err());
}
