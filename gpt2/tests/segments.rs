//! The segmented backward pass against a plain one, its order, its errors, and its independence of threads.

#![allow(clippy::unwrap_used, reason = "a test may fail")]

use burn::tensor::Device;
use comm_core::Buffer;
use gpt2::config::{ModelConfig, Preset};
use gpt2::dropout::Dropout;
use gpt2::init::initial_values;
use gpt2::model::KernelChoice;
use gpt2::segments::{Compute, Destination, ModelError, PassHooks, SegmentGrads, SegmentedModel, TokenBatch};

const SEED: u64 = 1337;

fn config() -> ModelConfig {
    Preset::Micro.config(61)
}

fn model() -> SegmentedModel {
    SegmentedModel::new(config(), SEED, &Device::flex()).unwrap()
}

fn batch(rows: usize, cols: usize) -> TokenBatch {
    let tokens: Vec<i32> = (0..rows * cols + 1).map(|i| (i * i * 31 + i * 7) as i32 % 61).collect();
    TokenBatch { inputs: tokens[..rows * cols].to_vec(), targets: tokens[1..].to_vec(), rows, cols }
}

fn gradients(model: &mut SegmentedModel, batch: &TokenBatch, scale: f32) -> (f64, Vec<Vec<f32>>) {
    let mut all = vec![Vec::new(); model.segments().len()];
    let loss = model
        .forward_backward(batch, scale, &mut |segment, grads| {
            all[segment] = grads.into_flat()?;
            Ok::<_, ModelError>(())
        })
        .unwrap();
    (loss, all)
}

fn bits(all: &[Vec<f32>]) -> Vec<u32> {
    all.iter().flatten().map(|x| x.to_bits()).collect()
}

#[test]
fn composed_kernels_give_what_fused_ones_give() {
    let mut fused = model();
    let compute = Compute { kernels: KernelChoice::Composed, ..Compute::default() };
    let mut composed = SegmentedModel::absent(config(), compute, &Device::flex()).unwrap();
    for segment in 0..fused.segments().len() {
        let weights = fused.read_params(segment).unwrap();
        composed.write_params(segment, &weights).unwrap();
    }
    let batch = batch(3, 32);
    let ((loss, all), (composed_loss, others)) =
        (gradients(&mut fused, &batch, 1.0), gradients(&mut composed, &batch, 1.0));
    assert!((loss - composed_loss).abs() < 1e-6, "{loss} {composed_loss}");
    assert!((fused.loss(&batch).unwrap() - composed.loss(&batch).unwrap()).abs() < 1e-6);
    assert_ne!(bits(&all), bits(&others), "one and the same kernels ran twice");
    for (info, (a, b)) in fused.segments().iter().zip(all.iter().zip(&others)) {
        let bound = 1e-5 * b.iter().fold(0.0f32, |most, x| most.max(x.abs()));
        assert!(a.iter().zip(b).all(|(a, b)| (a - b).abs() <= bound), "{}", info.name);
    }
}

#[test]
fn weights_are_taken_and_put_back_without_a_copy() {
    let mut model = model();
    for segment in 0..model.segments().len() {
        let read = model.read_params(segment).unwrap();
        assert_eq!(model.params(segment).unwrap(), read);
        let start = model.params(segment).unwrap().as_ptr();
        let mut taken = model.take_params(segment).unwrap().unwrap();
        assert_eq!((taken.as_ptr(), &taken), (start, &read));
        assert!(matches!(model.read_params(segment), Err(ModelError::Absent { .. })));
        assert!(model.take_params(segment).unwrap().is_none());
        taken[0] += 1.0;
        model.put_params(segment, Buffer::from_vec(taken)).unwrap();
        assert_eq!(model.params(segment).unwrap().as_ptr(), start);
        assert_eq!(model.read_params(segment).unwrap()[0], read[0] + 1.0);
    }
    // A pass leaves nobody else with the weights.
    let (start, batch) = (model.params(1).unwrap().as_ptr(), batch(2, 8));
    gradients(&mut model, &batch, 1.0);
    let taken = model.take_params(1).unwrap().unwrap();
    assert_eq!(taken.as_ptr(), start);
}

#[test]
fn gradients_are_added_where_they_are_wanted() {
    /// Wants each segment's behind two values, and then onto what came.
    struct Wants {
        onto: bool,
        all: Vec<Vec<f32>>,
    }
    impl PassHooks<ModelError> for Wants {
        fn destination(&mut self, segment: usize) -> Destination {
            let before = std::mem::take(&mut self.all[segment]);
            if self.onto { Destination::Onto(before) } else { Destination::Behind(vec![7.0, 8.0]) }
        }

        fn gradients(&mut self, grads: SegmentGrads) -> Result<(), ModelError> {
            let segment = grads.segment();
            self.all[segment] = grads.into_flat()?;
            if !self.onto {
                assert_eq!(self.all[segment].drain(..2).collect::<Vec<_>>(), [7.0, 8.0]);
            }
            Ok(())
        }
    }
    let mut model = model();
    let batches = [batch(2, 8), batch(3, 32)];
    let [(_, first), (_, second)] = batches.clone().map(|batch| gradients(&mut model, &batch, 1.0));
    let mut wants = Wants { onto: false, all: vec![Vec::new(); model.segments().len()] };
    model.train(&batches[0], 1.0, &mut wants).unwrap();
    assert_eq!(bits(&wants.all), bits(&first));
    wants.onto = true;
    model.train(&batches[1], 1.0, &mut wants).unwrap();
    for (sum, (first, second)) in wants.all.iter().flatten().zip(first.iter().flatten().zip(second.iter().flatten())) {
        assert!((sum - (first + second)).abs() <= 1e-6 * (first.abs() + second.abs()) + 1e-7, "{sum} {first} {second}");
    }
}

#[test]
fn gradients_equal_those_of_one_plain_backward() {
    let mut model = model();
    // Fewer tokens than positions, too: the rest of the position table gets zeros.
    for (rows, cols) in [(3, 32), (2, 7), (1, 1)] {
        let batch = batch(rows, cols);
        let (loss, all) = gradients(&mut model, &batch, 2.0);
        let (plain_loss, plain) = model.plain_gradients(&batch, 2.0).unwrap();
        assert!((loss - plain_loss).abs() < 1e-6, "{loss} {plain_loss}");
        assert!((model.loss(&batch).unwrap() - loss).abs() < 1e-6);
        for (info, (a, b)) in model.segments().iter().zip(all.iter().zip(&plain)) {
            for param in &info.params {
                let range = param.offset..param.offset + param.len;
                let (a, b) = (&a[range.clone()], &b[range]);
                let scale = b.iter().fold(0.0f32, |m, x| m.max(x.abs()));
                // Not equal to the bit: the head's softmax is computed in another way, and the two parts of the tied table are
                // added in another order. Gradients that vanish exactly (keys' biases) are rounding noise on both sides.
                let bound = 1e-5 * scale + 1e-8;
                for (x, y) in a.iter().zip(b) {
                    assert!((x - y).abs() <= bound, "{}: {x} {y}", param.path);
                }
            }
        }
    }
}

#[test]
fn all_kernels_drop_the_same_and_passes_without_gradients_nothing() {
    let batch = batch(3, 32);
    let [mut fused, mut composed, mut recomputed] = [
        Compute::default(),
        Compute { kernels: KernelChoice::Composed, ..Compute::default() },
        Compute { recompute: true, ..Compute::default() },
    ]
    .map(|compute| {
        let (whole, mut model) = (model(), SegmentedModel::absent(config(), compute, &Device::flex()).unwrap());
        for segment in 0..whole.segments().len() {
            model.write_params(segment, &whole.read_params(segment).unwrap()).unwrap();
        }
        model
    });
    let (without, loss) = (gradients(&mut fused, &batch, 1.0), fused.loss(&batch).unwrap());
    let dropout = Dropout::new(0.3, 1, 2, 5);
    for model in [&mut fused, &mut composed, &mut recomputed] {
        model.set_dropout(dropout);
    }
    let dropped = gradients(&mut fused, &batch, 1.0);
    assert!((dropped.0 - without.0).abs() > 1e-3, "nothing is dropped");
    assert_eq!(fused.loss(&batch).unwrap().to_bits(), loss.to_bits());
    let again = gradients(&mut recomputed, &batch, 1.0);
    assert_eq!((again.0.to_bits(), bits(&again.1)), (dropped.0.to_bits(), bits(&dropped.1)));
    for (what, (loss, all)) in [
        ("composed", gradients(&mut composed, &batch, 1.0)),
        ("one plain backward pass", fused.plain_gradients(&batch, 1.0).unwrap()),
    ] {
        assert!((loss - dropped.0).abs() < 1e-6, "{what}: {loss} {}", dropped.0);
        for (info, (a, b)) in fused.segments().iter().zip(dropped.1.iter().zip(&all)) {
            let bound = 1e-5 * b.iter().fold(0.0f32, |most, x| most.max(x.abs()));
            assert!(a.iter().zip(b).all(|(a, b)| (a - b).abs() <= bound), "{what}: {}", info.name);
        }
    }
    // The same sequences in other passes: the global batch in one piece, or a sequence at a time.
    let mut sums = vec![Vec::new(); dropped.1.len()];
    for row in 0..batch.rows {
        let part = |tokens: &[i32]| tokens[row * batch.cols..][..batch.cols].to_vec();
        let one = TokenBatch { inputs: part(&batch.inputs), targets: part(&batch.targets), rows: 1, cols: batch.cols };
        fused.set_dropout(Dropout::new(0.3, 1, 2, 5 + row));
        for (sum, grads) in sums.iter_mut().zip(gradients(&mut fused, &one, 1.0 / 3.0).1) {
            sum.resize(grads.len(), 0.0f32);
            sum.iter_mut().zip(grads).for_each(|(sum, grad)| *sum += grad);
        }
    }
    for (info, (a, b)) in fused.segments().iter().zip(sums.iter().zip(&dropped.1)) {
        let bound = 1e-5 * b.iter().fold(0.0f32, |most, x| most.max(x.abs()));
        assert!(a.iter().zip(b).all(|(a, b)| (a - b).abs() <= bound), "row by row: {}", info.name);
    }
}

#[test]
fn segments_come_last_to_first_and_the_caller_can_stop() {
    let mut model = model();
    let mut order = Vec::new();
    let result = model.forward_backward(&batch(2, 8), 1.0, &mut |segment, grads| {
        assert_eq!(grads.segment(), segment);
        order.push(segment);
        Ok::<_, ModelError>(())
    });
    assert!(result.is_ok());
    assert_eq!(order, [3, 2, 1, 0]);

    #[derive(Debug)]
    enum Mine {
        Model(#[allow(dead_code)] ModelError),
        Stop,
    }
    impl From<ModelError> for Mine {
        fn from(error: ModelError) -> Self {
            Self::Model(error)
        }
    }
    let mut calls = 0;
    let result = model.forward_backward(&batch(2, 8), 1.0, &mut |segment, _| {
        calls += 1;
        if segment == 2 { Err(Mine::Stop) } else { Ok(()) }
    });
    assert!(matches!(result, Err(Mine::Stop)));
    assert_eq!(calls, 2);
}

#[test]
fn the_layout_is_what_the_module_tree_holds() {
    let model = model();
    let count: usize = model.segments().iter().map(|info| info.len).sum();
    assert_eq!(count, model.config().parameter_count());
    for (segment, info) in model.segments().iter().enumerate() {
        let flat = model.read_params(segment).unwrap();
        assert_eq!(flat.len(), info.len);
        let mut end = 0;
        for param in &info.params {
            assert_eq!(param.offset, end);
            assert_eq!(param.len, param.shape.iter().product::<usize>());
            end += param.len;
            let expected = initial_values(model.config(), SEED, &param.path, param.len);
            assert_eq!(flat[param.offset..end], expected, "{}", param.path);
        }
        assert_eq!(end, info.len);
    }
}

#[test]
fn weights_can_be_replaced_segment_by_segment() {
    let mut model = model();
    for segment in 0..model.segments().len() {
        let values: Vec<f32> = (0..model.segments()[segment].len).map(|i| (segment * 1000 + i) as f32).collect();
        model.write_params(segment, &values).unwrap();
        assert_eq!(model.read_params(segment).unwrap(), values);
    }
    let error = model.write_params(1, &[1.0]).unwrap_err();
    assert!(matches!(error, ModelError::SegmentLength { len: 1, .. }));
    assert!(matches!(model.write_params(4, &[]), Err(ModelError::NoSuchSegment { segment: 4, segments: 4 })));
    assert!(model.read_params(4).is_err());
}

#[test]
fn neither_threads_nor_neighbours_change_a_bit() {
    let run = |threads: usize| {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        pool.install(|| {
            let mut model = SegmentedModel::new(Preset::Tiny.config(256), SEED, &Device::flex()).unwrap();
            bits(&gradients(&mut model, &batch(4, 64), 1.0).1)
        })
    };
    let alone = run(1);
    assert_eq!(alone, run(3));
    // Ranks as threads of one process, each inside its own pool.
    std::thread::scope(|scope| {
        let ranks: Vec<_> = (1..=2).map(|threads| scope.spawn(move || run(threads))).collect();
        for rank in ranks {
            assert_eq!(rank.join().unwrap(), alone);
        }
    });
}

#[test]
fn the_start_is_as_good_as_a_uniform_guess() {
    let model = SegmentedModel::new(Preset::Tiny.config(256), SEED, &Device::flex()).unwrap();
    let loss = model.loss(&batch(4, 64)).unwrap();
    assert!((loss - 256f64.ln()).abs() < 0.1, "{loss}");
}

#[test]
fn attention_sees_no_later_token() {
    let model = model();
    let mut tokens: Vec<i32> = batch(1, 16).inputs;
    let before = model.logits(&tokens, 1, 16).unwrap();
    tokens[10] = (tokens[10] + 1) % 61;
    let after = model.logits(&tokens, 1, 16).unwrap();
    assert_eq!(before[..10 * 61], after[..10 * 61]);
    assert_ne!(before[10 * 61..11 * 61], after[10 * 61..11 * 61]);
    assert_ne!(before[15 * 61..], after[15 * 61..]);
}

#[test]
fn bad_batches_are_explained() {
    let mut model = model();
    let good = batch(2, 8);
    let mut refuse = |spoil: &dyn Fn(&mut TokenBatch)| {
        let mut bad = good.clone();
        spoil(&mut bad);
        let error = model.loss(&bad).unwrap_err();
        let result = model.forward_backward(&bad, 1.0, &mut |_, _| Ok::<_, ModelError>(()));
        assert_eq!(error.to_string(), result.unwrap_err().to_string());
        error
    };
    use ModelError::{BatchShape, SequenceLength, TokenOutOfRange};
    assert!(matches!(refuse(&|b| b.inputs[3] = 61), TokenOutOfRange { token: 61, index: 3, what: "inputs", .. }));
    assert!(matches!(refuse(&|b| b.targets[5] = -1), TokenOutOfRange { token: -1, index: 5, what: "targets", .. }));
    assert!(matches!(refuse(&|b| b.rows = 3), BatchShape { .. }));
    assert!(matches!(refuse(&|b| b.targets.truncate(15)), BatchShape { what: "targets", .. }));
    assert!(matches!(refuse(&|b| b.rows = usize::MAX), BatchShape { .. }));
    assert!(matches!(refuse(&|b| b.cols = 33), SequenceLength { block_size: 32, .. }));
    assert!(matches!(refuse(&|b| b.rows = 0), SequenceLength { .. }));
    assert!(matches!(refuse(&|b| b.cols = 0), SequenceLength { .. }));
    assert!(model.logits(&[1, 2, 99], 1, 3).is_err());
}

#[test]
fn a_model_can_move_to_a_rank_thread() {
    fn assert_send<T: Send>() {}
    assert_send::<SegmentedModel>();
    assert_send::<gpt2::segments::SegmentGrads>();
}
