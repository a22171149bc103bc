//! Gradients that stay on a device: packed there for transports that move bytes, and never read back for a communicator that works on the
//! device's own memory. The device is the CPU's backend, and what stands for its memory is a host vector that only the test's own
//! communicator takes.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod local;

use std::any::Any;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::Duration;

use burn::tensor::{Device, Tensor, TensorData};
use comm_core::{
    BorrowedCall, Buffer, Call, Communicator, Completed, DType, DeviceMemory, Error, Failed, Handle, HostBuffer, Mode,
};
use gpt2::batches::LastBatch;
use gpt2::config::{ModelConfig, Preset};
use gpt2::flat::{DeviceCollectives, Flat};
use gpt2::optim::{LossScaling, OptimizerConfig, OptimizerKind};
use gpt2::precision::Precision;
use gpt2::segments::layout;
use gpt2::strategy::{self, Clock, Comms, StrategyKind, StrategyOptions};
use gpt2::trainer::{Observer, Session, Summary, TrainConfig, train};
use gpt2::transports::{TransportOptions, local_sessions};

use local::{TOLERANCE, VARIANTS, assert_close, corpus, run, single, with};

/// Memory of a device that is none.
#[derive(Debug)]
struct Memory(HostBuffer);

impl DeviceMemory for Memory {
    fn dtype(&self) -> DType {
        self.0.dtype()
    }

    fn count(&self) -> usize {
        self.0.count()
    }

    fn as_any_mut(&mut self) -> &mut dyn Any {
        self
    }
}

impl Memory {
    fn of(buffer: Buffer) -> Result<HostBuffer, Error> {
        match buffer {
            Buffer::Device(mut memory) => match memory.as_any_mut().downcast_mut::<Memory>() {
                Some(Memory(host)) => Ok(std::mem::replace(host, HostBuffer::U8(Vec::new()))),
                None => Err(Error::invalid("a buffer of another device")),
            },
            Buffer::Host(_) => Err(Error::invalid("a buffer in host memory")),
        }
    }
}

/// Lends tensors of the CPU.
struct Lender {
    device: Device,
    lent: AtomicU64,
}

impl Lender {
    fn new() -> Arc<Self> {
        Arc::new(Lender { device: Device::flex(), lent: AtomicU64::new(0) })
    }
}

impl DeviceCollectives for Lender {
    fn device(&self) -> &Device {
        &self.device
    }

    fn lend(&self, tensor: Tensor<1>) -> Result<Buffer, Error> {
        self.lent.fetch_add(1, Ordering::Relaxed);
        let data = tensor.into_data();
        let host = match data.dtype() {
            burn::tensor::DType::F32 => HostBuffer::F32(data.try_into_vec().unwrap()),
            burn::tensor::DType::BF16 => HostBuffer::Bf16(data.try_into_vec().unwrap()),
            burn::tensor::DType::F16 => HostBuffer::F16(data.try_into_vec().unwrap()),
            other => return Err(Error::invalid(format!("a tensor of {other:?}"))),
        };
        Ok(Buffer::Device(Box::new(Memory(host))))
    }

    fn take_back(&self, buffer: Buffer) -> Result<Tensor<1>, Error> {
        let host = Memory::of(buffer)?;
        let count = host.count();
        let (data, dtype) = match host {
            HostBuffer::F32(values) => (TensorData::new(values, [count]), burn::tensor::DType::F32),
            HostBuffer::Bf16(values) => (TensorData::new(values, [count]), burn::tensor::DType::BF16),
            HostBuffer::F16(values) => (TensorData::new(values, [count]), burn::tensor::DType::F16),
            other => return Err(Error::invalid(format!("a buffer of {}", other.dtype()))),
        };
        Ok(Tensor::from_data(data, (&self.device, dtype)))
    }
}

/// Works on [`Memory`], and on the host's through a detour that is counted.
struct Native {
    inner: Arc<dyn Communicator>,
    detours: Arc<AtomicU64>,
}

#[deny(clippy::missing_trait_methods)]
impl Communicator for Native {
    fn name(&self) -> &str {
        "native"
    }

    fn rank(&self) -> usize {
        self.inner.rank()
    }

    fn world_size(&self) -> usize {
        self.inner.world_size()
    }

    fn lanes(&self) -> usize {
        self.inner.lanes()
    }

    fn id(&self) -> u64 {
        self.inner.id()
    }

    fn start(&self, call: Call) -> Handle {
        let lend = |buffer| Buffer::Device(Box::new(Memory(buffer)));
        if matches!(call.buffer, Buffer::Host(_)) {
            self.detours.fetch_add(1, Ordering::Relaxed);
            return self.inner.start(call);
        }
        let buffer = match Memory::of(call.buffer) {
            Ok(buffer) => buffer,
            Err(error) => return Handle::done(Err(Failed { error, buffer: None, input: call.input })),
        };
        let finish = move |outcome: Result<Completed, Failed>| {
            outcome.map(|completed| match completed.buffer {
                Buffer::Host(host) => Completed { buffer: lend(host), ..completed },
                Buffer::Device(_) => completed,
            })
        };
        let is_background = call.mode == Mode::Background;
        let under_way = self.inner.start(Call { buffer: Buffer::Host(buffer), ..call });
        if !is_background {
            return Handle::done(finish(under_way.wait()));
        }
        let (completer, handle) = Handle::pending();
        thread::spawn(move || completer.complete(finish(under_way.wait())));
        handle
    }

    fn run_borrowed(&self, _call: BorrowedCall<'_>) -> Result<(), Error> {
        Err(Error::invalid("memory of the host was lent to a device's communicator"))
    }

    /// Scalars are in host memory.
    fn split(&self, color: Option<u64>, key: i64) -> Result<Option<Arc<dyn Communicator>>, Error> {
        self.inner.split(color, key)
    }

    fn abort(&self, reason: &str) {
        self.inner.abort(reason);
    }

    fn finish(&self, timeout: Duration) -> Result<(), Error> {
        self.inner.finish(timeout)
    }
}

#[derive(Default)]
struct Warnings(Vec<String>);

impl Observer for Warnings {
    fn warning(&mut self, text: &str) {
        self.0.push(text.into());
    }
}

/// A run of one rank.
struct Outcome {
    summary: Summary,
    /// Buffers lent.
    lent: u64,
    /// Buffers of the host's that were communicated.
    detours: u64,
    warnings: Vec<String>,
}

/// Trains on ranks whose communicator works on a device's memory. All must agree on the result.
fn native(config: &TrainConfig, ranks: usize) -> Outcome {
    let corpus = corpus(20_000);
    let options = TransportOptions { timeout: Duration::from_secs(60), ..TransportOptions::default() };
    let outcomes: Vec<Outcome> = thread::scope(|scope| {
        let threads: Vec<_> = local_sessions(ranks, &options)
            .into_iter()
            .map(|session| {
                let corpus = &corpus;
                scope.spawn(move || {
                    let (lender, detours) = (Lender::new(), Arc::new(AtomicU64::new(0)));
                    let comm = Arc::new(Native { inner: session.comm.clone(), detours: detours.clone() });
                    let session = Session { comm, native: Some(lender.clone()), ..session };
                    let mut warnings = Warnings::default();
                    let summary = train(config, corpus, &session, &Device::flex(), None, &mut warnings).unwrap();
                    let (lent, detours) = (lender.lent.load(Ordering::Relaxed), detours.load(Ordering::Relaxed));
                    Outcome { summary, lent, detours, warnings: warnings.0 }
                })
            })
            .collect();
        threads.into_iter().map(|rank| rank.join().unwrap()).collect()
    });
    for outcome in &outcomes {
        assert_eq!(outcome.summary.weights_hash, outcomes[0].summary.weights_hash);
        assert_eq!(outcome.summary.losses, outcomes[0].summary.losses);
    }
    outcomes.into_iter().next().unwrap()
}

fn config(strategy: StrategyKind, ranks: usize) -> TrainConfig {
    TrainConfig { eval_every: 2, ..with(&single(4), (strategy, false), ranks) }
}

#[test]
fn training_in_device_memory_is_training_in_host_memory() {
    for variant in VARIANTS.into_iter().filter(|(kind, _)| kind.works_in_device_memory()) {
        for ranks in [2, 3] {
            let config = TrainConfig { eval_every: 2, ..with(&single(4), variant, ranks) };
            let what = format!("{variant:?} on {ranks} ranks");
            let Outcome { summary, lent, detours, warnings } = native(&config, ranks);
            let host = run(&config, &corpus(20_000), ranks);
            assert_close(&summary, &host, TOLERANCE, &what);
            let (found, expected) = (summary.validation_loss.unwrap(), host.validation_loss.unwrap());
            assert!((found / expected - 1.0).abs() < TOLERANCE, "{what}: {found} {expected}");
            assert_eq!(summary.ranks[0].operations, summary.ranks[0].expected.operations, "{what}");
            // Everything that was communicated was lent.
            assert_eq!(detours, 0, "{what}");
            assert!(lent >= config.steps * summary.ranks[0].operations, "{what}: {lent}");
            assert!(warnings.is_empty(), "{what}: {warnings:?}");
            assert_eq!(summary.ranks[0].optimizer_steps, (config.steps, config.steps), "{what}");
        }
    }
}

#[test]
fn one_device_trains_alone() {
    let config = single(6);
    let Outcome { summary, lent, detours, .. } = native(&config, 1);
    assert_eq!((lent, detours), (0, 0));
    assert_close(&summary, &run(&config, &corpus(20_000), 1), TOLERANCE, "single");
}

#[test]
fn sixteen_bits_scaling_and_accumulation_work_in_device_memory() {
    for strategy in [StrategyKind::Ddp, StrategyKind::Zero2, StrategyKind::Fsdp, StrategyKind::ShardedPs] {
        let config = config(strategy, 2);
        let narrow = StrategyOptions { wire: Precision::Bf16, ..config.options.clone() };
        let late = StrategyOptions { overlap: false, ..config.options.clone() };
        let scaling = LossScaling::Fixed { scale: 1024.0 };
        let varied = [
            TrainConfig { options: narrow.clone(), ..config.clone() },
            TrainConfig { precision: Precision::Bf16, loss_scaling: scaling, options: narrow, ..config.clone() },
            TrainConfig { accumulation: 3, loss_scaling: scaling, ..config.clone() },
            TrainConfig { accumulation: 2, options: late, ..config },
        ];
        for config in varied {
            let Outcome { summary, detours, .. } = native(&config, 2);
            let host = run(&config, &corpus(20_000), 2);
            let tolerance = if config.precision == Precision::Bf16 { 1e-2 } else { TOLERANCE };
            let what = format!("{strategy}, {}, {}, {}", config.precision, config.options.wire, config.accumulation);
            assert_close(&summary, &host, tolerance, &what);
            assert_eq!(detours, 0, "{what}");
        }
    }
}

#[test]
fn an_overflow_is_skipped_in_device_memory_too() {
    let config = TrainConfig {
        precision: Precision::F16,
        loss_scaling: LossScaling::Fixed { scale: 1_073_741_824.0 },
        loss_factor: 1e6,
        ..config(StrategyKind::Ddp, 2)
    };
    assert_eq!(native(&config, 2).summary.skipped_steps, config.steps);
}

#[test]
fn rows_that_do_not_fill_a_step_leave_ranks_without_data() {
    let config = TrainConfig {
        last_batch: LastBatch::Join,
        global_batch: 6,
        accumulation: 2,
        steps: 24,
        model: ModelConfig { block_size: 128, ..Preset::Micro.config(256) },
        ..config(StrategyKind::Ddp, 3)
    };
    let Outcome { summary, .. } = native(&config, 3);
    assert_close(&summary, &run(&config, &corpus(20_000), 3), 10.0 * TOLERANCE, "ddp with ranks without data");
}

#[test]
fn what_works_in_host_memory_only_goes_there_and_says_so() {
    let lamb = |config: TrainConfig| TrainConfig { optimizer: OptimizerConfig::of(OptimizerKind::Lamb), ..config };
    let staged = [
        (config(StrategyKind::Hierarchical, 2), 2, "strategy hierarchical"),
        (lamb(config(StrategyKind::Ddp, 2)), 2, "optimizer lamb"),
        (lamb(single(3)), 1, "optimizer lamb"),
    ];
    for (config, ranks, what) in staged {
        let Outcome { summary, lent, warnings, .. } = native(&config, ranks);
        assert_eq!(summary.weights_hash, run(&config, &corpus(20_000), ranks).weights_hash, "{what}");
        assert_eq!(lent, 0, "{what}");
        assert!(warnings.len() == 1 && warnings[0].contains(what), "{what}: {warnings:?}");
    }
}

/// One step's gradients, on the device or in host memory, through a strategy on two ranks over a transport that moves bytes.
fn averaged(kind: StrategyKind, wire: Precision, on_device: bool) -> Vec<Vec<Vec<f32>>> {
    let segments = layout(&Preset::Micro.config(64)).unwrap();
    let lengths: Vec<usize> = segments.iter().map(|segment| segment.len).collect();
    let base = with(&single(1), (kind, false), 2).options;
    let options = StrategyOptions { wire, ..base };
    let values = |rank: usize, segment: usize, len: usize| -> Vec<f32> {
        (0..len).map(|i| ((i * 31 + segment * 7 + rank * 1013) % 2003) as f32 / 999.0 - 1.0).collect()
    };
    thread::scope(|scope| {
        let threads: Vec<_> = local_sessions(2, &TransportOptions::default())
            .into_iter()
            .map(|session| {
                let (lengths, options, segments) = (&lengths, &options, &segments);
                scope.spawn(move || {
                    let comms = Comms { world: session.comm.clone(), node: None, native: None };
                    let mut strategy = strategy::build(kind, &comms, lengths, options, Precision::F32).unwrap();
                    let mut clock = Clock::default();
                    strategy.begin(true);
                    for (segment, info) in segments.iter().enumerate().rev() {
                        let whole = values(session.comm.rank(), segment, info.len);
                        let tensor = |range: std::ops::Range<usize>| {
                            let data = TensorData::new(whole[range.clone()].to_vec(), [range.len()]);
                            Tensor::<1>::from_data(data, &Device::flex())
                        };
                        let parts = info.params.iter().map(|param| tensor(param.offset..param.offset + param.len));
                        let flat = if on_device { Flat::Device(parts.collect()) } else { Flat::Host(whole.clone()) };
                        strategy.gradient(segment, flat, &mut clock).unwrap();
                    }
                    let grads = strategy.synchronise(&mut clock).unwrap();
                    assert!(grads.iter().all(|grads| matches!(grads, Flat::Host(_))), "{kind}");
                    session.comm.finish(Duration::from_secs(60)).unwrap();
                    grads.into_iter().map(|grads| grads.into_host().unwrap()).collect()
                })
            })
            .collect();
        threads.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

#[test]
fn packing_on_the_device_for_a_byte_transport_changes_no_bit() {
    for kind in StrategyKind::ALL.into_iter().filter(|kind| *kind != StrategyKind::Single) {
        for wire in Precision::ALL {
            assert_eq!(averaged(kind, wire, true), averaged(kind, wire, false), "{kind}, {wire}");
        }
    }
}
