use std::collections::BTreeSet;

use super::*;
use crate::{corpus::CorpusSource, tokenizer::TokenizerKind};

/// Shards whose ids are their own positions, so that a window shows where it was cut.
fn numbered(train: usize, validation: usize) -> Corpus {
    let folder = tempfile::tempdir().unwrap();
    for (name, count) in [("train.bin", train), ("val.bin", validation)] {
        let bytes: Vec<u8> = (0..count).flat_map(|id| (id as u16).to_le_bytes()).collect();
        std::fs::write(folder.path().join(name), bytes).unwrap();
    }
    Corpus::load(&CorpusSource::Path(folder.path().to_owned()), TokenizerKind::Gpt2).unwrap()
}

fn share(rank: usize, world: usize, accumulation: usize) -> Share {
    Share { rank, world, accumulation }
}

/// The global batch of a step put together from the shares of all ranks, and the positions its windows start at.
fn global(batches: &Batches, step: u64, world: usize, accumulation: usize) -> (Vec<i32>, Vec<i32>) {
    let mut inputs = Vec::new();
    for rank in 0..world {
        for micro_step in 0..accumulation {
            let batch = batches.rows(step, micro_step, share(rank, world, accumulation)).unwrap();
            assert_eq!(batch.rows, batches.global_batch / world / accumulation);
            assert_eq!(batch.cols, batches.block_size);
            assert_eq!(batch.inputs.len(), batch.rows * batch.cols);
            let shifted: Vec<i32> = batch.inputs.iter().map(|id| id + 1).collect();
            assert_eq!(batch.targets, shifted, "targets are one token further on");
            for row in batch.inputs.chunks(batch.cols) {
                assert!(row.windows(2).all(|pair| pair[1] == pair[0] + 1), "a row is contiguous");
            }
            inputs.extend(batch.inputs);
        }
    }
    let starts = inputs.iter().step_by(batches.block_size).copied().collect();
    (inputs, starts)
}

#[test]
fn the_global_batch_is_the_same_for_every_number_of_ranks_and_micro_steps() {
    let batches = Batches::new(&numbered(2_000, 100), 8, 24, 7).unwrap();
    for step in [0, 1, 9, 10, 11, 1_000, u64::MAX] {
        let (whole, _) = global(&batches, step, 1, 1);
        for (world, accumulation) in [(1, 2), (1, 24), (2, 1), (2, 3), (3, 1), (3, 4), (4, 1), (4, 2), (24, 1)] {
            assert_eq!(global(&batches, step, world, accumulation).0, whole, "{world} ranks, {accumulation}");
        }
    }
}

#[test]
fn an_epoch_visits_distinct_windows_and_all_but_the_tail() {
    let corpus = numbered(2_003, 100);
    let batches = Batches::new(&corpus, 8, 12, 7).unwrap();
    // (2003 - 8) / 8 = 249 windows, 20 steps of 12, 9 windows over.
    assert_eq!(batches.steps_per_epoch(), 20);
    let mut offsets = BTreeSet::new();
    let mut dropped = BTreeSet::new();
    for epoch in 0..12 {
        for world in 1..=4 {
            let mut of_rank = vec![Vec::new(); world];
            for step in 0..20 {
                for (rank, starts) in of_rank.iter_mut().enumerate() {
                    let batch = batches.rows(epoch * 20 + step, 0, share(rank, world, 1)).unwrap();
                    assert_eq!(batch.rows, 12 / world);
                    starts.extend(batch.inputs.iter().step_by(8).copied());
                }
            }
            let all: Vec<i32> = of_rank.concat();
            let distinct: BTreeSet<i32> = all.iter().copied().collect();
            assert_eq!(distinct.len(), 240, "ranks read disjoint windows");
            assert!(of_rank.iter().all(|starts| starts.len() == 240 / world));
            let offset = all[0] % 8;
            assert!(all.iter().all(|start| start % 8 == offset && start + 8 < 2_003), "windows do not overlap");
            offsets.insert(offset);
            let windows: BTreeSet<i32> = (0..249).map(|window| offset + window * 8).collect();
            assert!(distinct.is_subset(&windows));
            dropped.extend(windows.difference(&distinct).map(|start| start / 8));
        }
    }
    assert!(offsets.len() > 3, "the offset shifts between epochs: {offsets:?}");
    assert!(dropped.len() > 50, "the tail is another one each epoch: {}", dropped.len());
}

#[test]
fn every_offset_fits_where_the_corpus_is_just_long_enough() {
    // (G + 1) · T tokens are what the error asks for.
    let batches = Batches::new(&numbered(40, 10), 8, 4, 0).unwrap();
    let mut seen = BTreeSet::new();
    for step in 0..400 {
        let (inputs, _) = global(&batches, step, 2, 2);
        seen.extend(inputs);
    }
    assert_eq!(seen, (0..39).collect(), "every token but the last is an input in some epoch");
}

#[test]
fn the_order_follows_from_the_seed_and_the_step_alone() {
    let corpus = numbered(3_000, 100);
    let batches = |seed| Batches::new(&corpus, 16, 8, seed).unwrap();
    let forwards: Vec<_> = (0..60).map(|step| global(&batches(3), step, 1, 1)).collect();
    let one = batches(3);
    for step in (0..60).rev() {
        assert_eq!(global(&one, step, 1, 1), forwards[step as usize], "step {step}, asked in reverse");
    }
    let other: Vec<_> = (0..60).map(|step| global(&batches(4), step, 1, 1)).collect();
    assert_ne!(forwards, other);
    let epoch = |number: usize| -> Vec<i32> {
        forwards[number * 23..(number + 1) * 23].iter().flat_map(|(_, starts)| starts.clone()).collect()
    };
    assert_eq!(one.steps_per_epoch(), 23);
    assert_ne!(epoch(0), epoch(1));
    assert!(!epoch(0).is_sorted());
}

#[test]
fn the_documented_order_is_pinned() {
    // A change of these numbers changes what every seed trains on.
    let batches = Batches::new(&numbered(1_000, 100), 10, 6, 42).unwrap();
    let starts: Vec<_> = [0, 16, 5_000].map(|step| global(&batches, step, 1, 1).1).into();
    assert_eq!(starts, PINNED);
}

/// Computed by a program written apart from this one, from the description at the top.
const PINNED: [[i32; 6]; 3] =
    [[846, 836, 376, 676, 166, 826], [535, 75, 945, 905, 255, 265], [512, 2, 932, 112, 282, 712]];

#[test]
fn validation_rows_are_fixed_shared_evenly_and_spread_over_the_part() {
    // 999 / 10 = 99 windows: 8 whole batches of 12.
    let batches = Batches::new(&numbered(1_000, 1_000), 10, 12, 1).unwrap();
    let rows = |max_batches, world, accumulation| -> Vec<i32> {
        let of_rank: Vec<Vec<i32>> = (0..world)
            .map(|rank| {
                let parts = batches.validation(max_batches, share(rank, world, accumulation)).unwrap();
                assert!(parts.iter().all(|part| part.rows <= 12 / world / accumulation && part.rows > 0));
                assert!(parts.iter().all(|part| { part.targets.iter().zip(&part.inputs).all(|(t, i)| *t == i + 1) }));
                parts.into_iter().flat_map(|part| part.inputs).step_by(10).collect()
            })
            .collect();
        assert!(of_rank.iter().all(|starts| starts.len() == of_rank[0].len()));
        of_rank.concat()
    };
    let three = rows(3, 1, 1);
    assert_eq!(three.len(), 36);
    assert!(three.is_sorted() && three[0] == 0 && three[35] >= 950, "{three:?}");
    assert_eq!(three.iter().collect::<BTreeSet<_>>().len(), 36);
    for (world, accumulation) in [(1, 3), (2, 1), (2, 3), (3, 2), (4, 1), (4, 3), (12, 1)] {
        assert_eq!(rows(3, world, accumulation), three);
    }
    assert_eq!(rows(1_000, 2, 1).len(), 96);
    assert_eq!(rows(usize::MAX, 3, 1).len(), 96);

    // 9 / 10: no window at all.
    let none = Batches::new(&numbered(1_000, 10), 10, 12, 1).unwrap();
    let error = none.validation(5, share(0, 1, 1)).unwrap_err();
    assert!(matches!(error, BatchError::ValidationTooShort { tokens: 10, block_size: 10, .. }), "{error}");
    assert!(error.to_string().contains("which needs 11"), "{error}");
}

#[test]
fn few_validation_rows_are_the_same_for_every_number_of_ranks() {
    // 89 / 10 = 8 windows, fewer than a batch.
    let batches = Batches::new(&numbered(1_000, 90), 10, 12, 1).unwrap();
    for (world, accumulation, rows) in [
        (1, 1, vec![vec![8]]),
        (1, 6, vec![vec![2; 4]]),
        (2, 1, vec![vec![4]; 2]),
        (2, 2, vec![vec![3, 1]; 2]),
        (3, 1, vec![vec![3], vec![3], vec![2]]),
        (3, 2, vec![vec![2, 1], vec![2, 1], vec![2, 0]]),
        (4, 1, vec![vec![2]; 4]),
        (6, 1, vec![vec![2], vec![2], vec![1], vec![1], vec![1], vec![1]]),
        (12, 1, [vec![vec![1]; 8], vec![vec![0]; 4]].concat()),
    ] {
        let of_rank = |rank| batches.validation(3, share(rank, world, accumulation)).unwrap();
        let all: Vec<Vec<TokenBatch>> = (0..world).map(of_rank).collect();
        let counts: Vec<Vec<usize>> = all.iter().map(|parts| parts.iter().map(|part| part.rows).collect()).collect();
        assert_eq!(counts, rows, "{world} ranks, {accumulation} micro-steps");
        let starts: Vec<i32> = all.iter().flatten().flat_map(|part| part.inputs.iter().step_by(10).copied()).collect();
        assert_eq!(starts, [0, 10, 20, 30, 40, 50, 60, 70], "{world} ranks, {accumulation} micro-steps");
        let empty = all.iter().flatten().filter(|part| part.rows == 0);
        assert!(empty.clone().all(|part| *part == TokenBatch::none(10)), "{:?}", empty.collect::<Vec<_>>());
    }
}

#[test]
fn validation_is_never_seen_in_training() {
    let corpus = Corpus::load(&CorpusSource::Synthetic { seed: 1, bytes: 1_000 }, TokenizerKind::Bytes).unwrap();
    assert_eq!((corpus.train().len(), corpus.validation().len()), (900, 100));
    // The training stream ends before the validation part: no window can reach into it.
    assert!(corpus.train().read(899, 2, &mut Vec::new()).is_err());
}

#[test]
fn every_error_says_what_to_try() {
    let corpus = numbered(39, 10);
    let error = Batches::new(&corpus, 8, 4, 0).unwrap_err();
    assert!(matches!(error, BatchError::TooShort { tokens: 39, windows: 3, needed: 40, .. }));
    let text = error.to_string();
    assert!(
        text.contains("2 token shards in") && text.contains("needs 40 tokens") && text.contains("for each rank"),
        "{text}"
    );
    assert!(matches!(Batches::new(&corpus, 64, 1, 0), Err(BatchError::TooShort { windows: 0, .. })));
    assert!(matches!(Batches::new(&corpus, usize::MAX, usize::MAX, 0), Err(BatchError::TooShort { .. })));
    assert!(matches!(Batches::new(&corpus, 0, 1, 0), Err(BatchError::Zero { what: "block size" })));
    assert!(matches!(Batches::new(&corpus, 1, 0, 0), Err(BatchError::Zero { what: "global batch" })));

    let batches = Batches::new(&corpus, 3, 12, 0).unwrap();
    let fails = |micro_step, share| batches.rows(0, micro_step, share).unwrap_err();
    let error = fails(0, share(0, 5, 1));
    assert!(matches!(error, BatchError::Uneven { global_batch: 12, world: 5, accumulation: 1 }));
    assert!(error.to_string().contains("multiple of 5"), "{error}");
    assert!(matches!(fails(0, share(0, 4, 2)), BatchError::Uneven { .. }));
    assert!(matches!(fails(0, share(0, 24, 1)), BatchError::Uneven { .. }));
    assert!(matches!(fails(0, share(0, usize::MAX, 2)), BatchError::Uneven { .. }));
    assert!(matches!(fails(0, share(3, 3, 1)), BatchError::NoSuchRank { rank: 3, world: 3 }));
    assert!(matches!(fails(2, share(0, 1, 2)), BatchError::NoSuchMicroStep { micro_step: 2, accumulation: 2 }));
    assert!(matches!(fails(0, share(0, 0, 1)), BatchError::Zero { .. }));
    assert!(matches!(fails(0, share(0, 1, 0)), BatchError::Zero { .. }));
    assert!(matches!(batches.validation(0, share(0, 1, 1)), Err(BatchError::Zero { .. })));
}

fn joined(corpus: &Corpus, block_size: usize, global_batch: usize) -> Batches {
    Batches::with_last_batch(corpus, block_size, global_batch, 7, LastBatch::Join).unwrap()
}

/// The positions at which the windows of a step start, in the order of ranks and micro-steps, and the rows of each part.
fn parts(batches: &Batches, step: u64, world: usize, accumulation: usize) -> (Vec<i32>, Vec<usize>) {
    let mut starts = Vec::new();
    let mut rows = Vec::new();
    for rank in 0..world {
        for micro_step in 0..accumulation {
            let batch = batches.rows(step, micro_step, share(rank, world, accumulation)).unwrap();
            assert_eq!(batch.cols, batches.block_size);
            assert_eq!((batch.inputs.len(), batch.targets.len()), (batch.rows * batch.cols, batch.rows * batch.cols));
            assert!(batch.targets.iter().zip(&batch.inputs).all(|(target, input)| *target == input + 1));
            starts.extend(batch.inputs.iter().step_by(batch.cols).copied());
            rows.push(batch.rows);
        }
    }
    assert_eq!(rows.iter().sum::<usize>(), batches.rows_in_step(step));
    (starts, rows)
}

#[test]
fn a_joined_epoch_sees_every_window_once_however_it_is_shared() {
    // All shares below divide 360 rows evenly. (6040 - 7) / 7 = 861 windows: 2 steps of 360 and 141 over.
    let batches = joined(&numbered(6_040, 100), 7, 360);
    assert_eq!(batches.steps_per_epoch(), 3);
    for epoch in 0..3 {
        let steps = epoch * 3..epoch * 3 + 3;
        assert_eq!(steps.clone().map(|step| batches.rows_in_step(step)).collect::<Vec<_>>(), [360, 360, 141]);
        let alone: Vec<Vec<i32>> = steps.clone().map(|step| parts(&batches, step, 1, 1).0).collect();
        let seen: BTreeSet<i32> = alone.concat().into_iter().collect();
        let offset = alone[0][0] % 7;
        assert_eq!(seen, (0..861).map(|window| offset + window * 7).collect(), "every window");
        assert_eq!(alone.concat().len(), 861, "once");
        for world in 1..=5 {
            for accumulation in 1..=3 {
                for (step, expected) in steps.clone().zip(&alone) {
                    let (starts, rows) = parts(&batches, step, world, accumulation);
                    assert_eq!(&starts, expected, "{world} ranks, {accumulation} micro-steps, step {step}");
                    let (least, most) = (rows.iter().min().unwrap(), rows.iter().max().unwrap());
                    assert!(most - least <= 1 && rows.is_sorted_by(|a, b| a >= b), "{rows:?}");
                    assert!(*most <= batches.rows_per_micro_step(share(0, world, accumulation)).unwrap());
                }
            }
        }
    }
}

#[test]
fn full_steps_of_the_first_epoch_are_the_same_with_and_without_join() {
    let corpus = numbered(998, 100);
    let (dropped, joined) = (Batches::new(&corpus, 7, 60, 7).unwrap(), joined(&corpus, 7, 60));
    assert_eq!(dropped.steps_per_epoch(), 2);
    for step in 0..2 {
        assert_eq!(dropped.rows_in_step(step), 60);
        assert_eq!(parts(&joined, step, 3, 2), parts(&dropped, step, 3, 2));
    }
    assert_eq!(dropped.rows_in_step(u64::MAX), 60);
    // The second epoch is the same as well, a step later.
    assert_eq!(parts(&joined, 3, 1, 1), parts(&dropped, 2, 1, 1));
    // Where all steps are full, there is nothing to join.
    let corpus = numbered(7 * 121, 100);
    let (dropped, joined) = (Batches::new(&corpus, 7, 60, 7).unwrap(), self::joined(&corpus, 7, 60));
    assert_eq!((dropped.steps_per_epoch(), joined.steps_per_epoch()), (2, 2));
    for step in [0, 1, 2, 17, u64::MAX] {
        assert_eq!(parts(&joined, step, 2, 1), parts(&dropped, step, 2, 1));
    }
}

#[test]
fn ranks_whose_data_is_used_up_get_empty_batches() {
    // 2 windows of an epoch for steps of 60: fewer than the ranks.
    let corpus = numbered(7 * 3, 100);
    assert!(matches!(Batches::new(&corpus, 7, 60, 7), Err(BatchError::TooShort { windows: 2, needed: 427, .. })));
    let batches = joined(&corpus, 7, 60);
    assert_eq!((batches.steps_per_epoch(), batches.rows_in_step(0), batches.rows_in_step(u64::MAX)), (1, 2, 2));
    let (starts, rows) = parts(&batches, 5, 5, 2);
    assert_eq!((starts.len(), rows), (2, vec![1, 1, 0, 0, 0, 0, 0, 0, 0, 0]));
    let empty = batches.rows(5, 1, share(4, 5, 2)).unwrap();
    assert_eq!(empty, TokenBatch { inputs: vec![], targets: vec![], rows: 0, cols: 7 });

    let error = batches.rows(0, 0, share(0, 7, 1)).unwrap_err();
    assert!(matches!(error, BatchError::Uneven { global_batch: 60, world: 7, .. }), "a full step would be refused");
    assert!(matches!(batches.rows(0, 2, share(0, 5, 2)), Err(BatchError::NoSuchMicroStep { .. })));
    let none = Batches::with_last_batch(&numbered(13, 10), 7, 60, 7, LastBatch::Join).unwrap_err();
    assert!(matches!(none, BatchError::TooShort { windows: 0, needed: 14, .. }));
    assert!(none.to_string().contains("one sequence needs 14 tokens"), "{none}");
}

#[test]
fn what_a_last_batch_does_is_read_as_it_is_written() {
    for choice in LastBatch::ALL {
        assert_eq!(choice.to_string().parse(), Ok(choice));
        assert_eq!(serde_json::to_string(&choice).unwrap(), format!("\"{choice}\""));
    }
    assert_eq!(LastBatch::default(), LastBatch::Drop);
    assert!("wrap".parse::<LastBatch>().unwrap_err().to_string().contains("drop, join"));
}

#[test]
fn short_sequences_are_pieces_in_the_first_steps() {
    let short: ShortSequences = "16x3".parse().unwrap();
    assert_eq!((short, short.to_string().as_str()), (ShortSequences { tokens: 16, steps: 3 }, "16x3"));
    assert_eq!([0, 2, 3, u64::MAX].map(|step| short.pieces(64, step)), [4, 4, 1, 1]);
    assert_eq!(serde_json::from_value::<ShortSequences>("16x3".into()).unwrap(), short);
    assert!(short.check(64).is_ok());
    assert!(short.check(40).unwrap_err().contains("--short-sequences 16x3"));
    for wrong in ["", "16", "x", "0x3", "16x", "-1x3", "16x-3", "16 x 3"] {
        assert!(wrong.parse::<ShortSequences>().unwrap_err().contains("TOKENSxSTEPS"), "{wrong}");
    }
    let batches = Batches::new(&numbered(2_000, 100), 8, 24, 7).unwrap();
    let whole = batches.rows(0, 0, share(0, 2, 1)).unwrap();
    let cut = whole.clone().cut(4);
    assert_eq!((cut.rows, cut.cols), (4 * whole.rows, 2));
    assert_eq!((cut.inputs, cut.targets), (whole.inputs, whole.targets));
}
