//! A device that is the CPU's backend, whose memory is a host vector that only a communicator of its own takes.

#![allow(clippy::unwrap_used, reason = "the helpers of tests are tests too")]
#![allow(unreachable_pub, reason = "a module of a test program")]

use std::any::Any;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::Duration;

use burn::tensor::{Device, Tensor, TensorData};
use comm_core::{
    BorrowedCall, Buffer, Call, Communicator, Completed, DType, DeviceMemory, Error, Failed, Handle, HostBuffer, Mode,
};
use gpt2::flat::DeviceCollectives;
use gpt2::trainer::Session;

/// A rank some of whose communicators work on its device's memory.
pub struct Equipped {
    lender: Arc<Lender>,
    natives: Vec<Arc<Native>>,
}

impl Equipped {
    /// Has the session's communicator, or that of its node, or both, work on the memory that `lender` lends.
    pub fn new(session: &mut Session, (world, node): (bool, bool), lender: Arc<Lender>) -> Self {
        let mut natives = Vec::new();
        let mut equip = |comm: &mut Arc<dyn Communicator>| -> Option<Arc<dyn DeviceCollectives>> {
            let native = Arc::new(Native { inner: comm.clone(), detours: Arc::default(), part: Part::Job });
            *comm = native.clone();
            natives.push(native);
            Some(lender.clone())
        };
        if world {
            session.native = equip(&mut session.comm);
        }
        if let Some(own) = session.node.as_mut().filter(|_| node) {
            own.native = equip(&mut own.comm);
        }
        Equipped { lender, natives }
    }

    /// Buffers lent so far.
    pub fn lent(&self) -> u64 {
        self.lender.lent.load(Ordering::Relaxed)
    }

    /// Buffers of the host's that these communicators and their parts got.
    pub fn detours(&self) -> u64 {
        self.natives.iter().map(|native| native.detours.load(Ordering::Relaxed)).sum()
    }
}

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
pub struct Lender {
    device: Device,
    lent: AtomicU64,
    busy: Duration,
}

impl Lender {
    pub fn new() -> Arc<Self> {
        Self::slow(Duration::ZERO)
    }

    /// Of a device that takes this long whenever it is waited for.
    pub fn slow(busy: Duration) -> Arc<Self> {
        Arc::new(Lender { device: Device::flex(), lent: AtomicU64::new(0), busy })
    }
}

impl DeviceCollectives for Lender {
    fn device(&self) -> &Device {
        &self.device
    }

    fn wait(&self) -> Result<(), Error> {
        thread::sleep(self.busy);
        Ok(())
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

/// Which ranks a communicator has, and so what it does with memory of the host's that it is lent.
enum Part {
    /// The job's or a node's own, which refuses it.
    Job,
    /// Split off another with all its ranks, as that of the scalars, which are in host memory.
    Everyone,
    /// Split off with some of them: for gradients, whose detour is counted.
    Some,
}

/// Works on [`Memory`], and on the host's through a detour that is counted.
struct Native {
    inner: Arc<dyn Communicator>,
    detours: Arc<AtomicU64>,
    part: Part,
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

    fn run_borrowed(&self, call: BorrowedCall<'_>) -> Result<(), Error> {
        match self.part {
            Part::Job => return Err(Error::invalid("memory of the host was lent to a device's communicator")),
            Part::Everyone => {}
            Part::Some => {
                self.detours.fetch_add(1, Ordering::Relaxed);
            }
        }
        self.inner.run_borrowed(call)
    }

    fn split(&self, color: Option<u64>, key: i64) -> Result<Option<Arc<dyn Communicator>>, Error> {
        let part = |inner: Arc<dyn Communicator>| -> Arc<dyn Communicator> {
            let part = if inner.world_size() == self.world_size() { Part::Everyone } else { Part::Some };
            Arc::new(Native { inner, detours: self.detours.clone(), part })
        };
        Ok(self.inner.split(color, key)?.map(part))
    }

    fn abort(&self, reason: &str) {
        self.inner.abort(reason);
    }

    fn finish(&self, timeout: Duration) -> Result<(), Error> {
        self.inner.finish(timeout)
    }
}
