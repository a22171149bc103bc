//! The transports of this workspace, one entry each.

use std::sync::Arc;

use comm_core::null::NullCommunicator;
use comm_core::shm::{ShmOptions, ShmTransport};
use comm_core::{Control, Deadline, Result};

use crate::entry::{Connected, Entry, Medium, Properties, TransportKind};
use crate::options::{Setting, TransportOptions};

/// Those that need nothing first.
pub(crate) static ENTRIES: [&Entry; 9] =
    [&NULL, &LOCAL, &SHM, &TCP_RAW, &TCP_IPC, &TCP, &QUIC_UNPROTECTED, &QUIC, &NCCL];

static NULL: Entry = Entry {
    name: "null",
    about: "nothing is sent",
    medium: Medium::Nothing,
    settings: &[],
    only_measured: true,
    missing: &|| None,
    check_values: &|_| Ok(()),
    connect: Some(&|kind, control, options| {
        let comm = NullCommunicator::new(control.rank(), control.world_size(), options.lanes)?;
        let properties = Properties { timing_only: true, ..Properties::of(kind) };
        Ok(Connected::new(Arc::new(comm), control, properties))
    }),
};

pub(crate) static LOCAL: Entry = Entry {
    name: "local",
    about: "threads of one process",
    medium: Medium::Threads,
    settings: Setting::OF_BYTES,
    only_measured: false,
    missing: &|| None,
    check_values: &|_| Ok(()),
    connect: None,
};

pub(crate) static SHM: Entry = Entry {
    name: "shm",
    about: "shared memory between processes",
    medium: Medium::SharedMemory,
    settings: &[Setting::Waiting, Setting::Checked, Setting::CheckFinite],
    only_measured: false,
    missing: &|| None,
    check_values: &|_| Ok(()),
    connect: Some(&|kind, control, options| {
        let for_ranks = ShmOptions::for_ranks(control.world_size(), options.lanes);
        let shm = ShmOptions { waiting: options.waiting, ..for_ranks };
        let transport = ShmTransport::connect(&*control, &shm, Deadline::after(options.timeout))?;
        Connected::over(kind, transport, control, options)
    }),
};

pub(crate) static TCP_RAW: Entry = Entry {
    name: "tcp-raw",
    about: "plain TCP",
    medium: Medium::Tcp,
    settings: &[Setting::Congestion, Setting::Waiting, Setting::Checked, Setting::CheckFinite],
    only_measured: false,
    missing: &|| lacks("tcp", cfg!(feature = "tcp")),
    check_values: &|_| Ok(()),
    connect: Some(&tcp::raw),
};

static TCP_IPC: Entry = Entry {
    name: "tcp-ipc",
    about: "ZeroMQ over Unix sockets",
    medium: Medium::UnixSockets,
    settings: &[Setting::Waiting, Setting::Checked, Setting::CheckFinite],
    only_measured: true,
    missing: &|| lacks("tcp", cfg!(feature = "tcp")),
    check_values: &|_| Ok(()),
    connect: Some(&tcp::ipc),
};

pub(crate) static TCP: Entry = Entry {
    name: "tcp",
    about: "ZeroMQ over TCP",
    medium: Medium::Tcp,
    settings: &[Setting::Congestion, Setting::Gate, Setting::Waiting, Setting::Checked, Setting::CheckFinite],
    only_measured: false,
    missing: &|| lacks("tcp", cfg!(feature = "tcp")),
    check_values: &|_| Ok(()),
    connect: Some(&tcp::zmq),
};

pub(crate) static QUIC: Entry = Entry {
    name: "quic",
    about: "QUIC, encrypted",
    medium: Medium::Udp,
    settings: &[Setting::Congestion, Setting::Mtu, Setting::Waiting, Setting::Checked, Setting::CheckFinite],
    only_measured: false,
    missing: &|| lacks("quic", cfg!(feature = "quic")),
    check_values: &quic::check,
    connect: Some(&quic::protected),
};

pub(crate) static NCCL: Entry = Entry {
    name: "nccl",
    about: "NCCL, between CUDA devices",
    medium: Medium::Devices,
    settings: &[],
    only_measured: false,
    missing: &nccl::missing,
    check_values: &|_| Ok(()),
    connect: Some(&nccl::connect),
};

static QUIC_UNPROTECTED: Entry = Entry {
    name: "quic-unprotected",
    about: "QUIC without packet protection",
    medium: Medium::Udp,
    settings: &[Setting::Congestion, Setting::Mtu, Setting::Waiting, Setting::Checked, Setting::CheckFinite],
    only_measured: true,
    missing: &|| lacks("unprotected", cfg!(feature = "unprotected")),
    check_values: &quic::check,
    connect: Some(&quic::unprotected),
};

fn lacks(feature: &str, is_there: bool) -> Option<String> {
    (!is_there).then(|| format!("this build lacks the feature `{feature}`; build with --features {feature}"))
}

/// What comes of connecting in a build without the feature.
#[cfg(not(all(feature = "tcp", feature = "quic", feature = "nccl", feature = "unprotected")))]
fn absent(kind: TransportKind) -> comm_core::Error {
    comm_core::Error::Unsupported { what: format!("the transport {kind}"), why: kind.missing().unwrap_or_default() }
}

#[cfg(feature = "tcp")]
mod tcp {
    use comm_tcp::{Gate, RawTcpTransport, TcpOptions, ZmqTransport};

    use super::*;

    fn options_of(options: &TransportOptions) -> TcpOptions {
        TcpOptions {
            lanes: options.lanes,
            bind: options.bind.clone(),
            congestion: options.congestion.clone(),
            gate: if options.gate { Gate::Filter } else { Gate::Off },
            waiting: options.waiting,
            ..TcpOptions::default()
        }
    }

    pub(super) fn raw(kind: TransportKind, control: Arc<dyn Control>, options: &TransportOptions) -> Result<Connected> {
        let deadline = Deadline::after(options.timeout);
        let transport = RawTcpTransport::connect(&*control, &options_of(options), deadline)?;
        Connected::over(kind, transport, control, options)
    }

    pub(super) fn zmq(kind: TransportKind, control: Arc<dyn Control>, options: &TransportOptions) -> Result<Connected> {
        let deadline = Deadline::after(options.timeout);
        let transport = ZmqTransport::connect(&*control, &options_of(options), deadline)?;
        Connected::over(kind, transport, control, options)
    }

    pub(super) fn ipc(kind: TransportKind, control: Arc<dyn Control>, options: &TransportOptions) -> Result<Connected> {
        let TransportOptions { lanes, waiting, timeout, .. } = *options;
        let ipc = TcpOptions { lanes, waiting, ipc: true, ..TcpOptions::default() };
        let transport = ZmqTransport::connect(&*control, &ipc, Deadline::after(timeout))?;
        Connected::over(kind, transport, control, options)
    }
}

#[cfg(not(feature = "tcp"))]
mod tcp {
    use super::*;

    pub(super) fn raw(kind: TransportKind, _: Arc<dyn Control>, _: &TransportOptions) -> Result<Connected> {
        Err(absent(kind))
    }

    pub(super) use raw as zmq;
    pub(super) use raw as ipc;
}

#[cfg(feature = "quic")]
mod quic {
    use comm_quic::{QuicOptions, QuicTransport};

    use super::*;

    fn options_of(options: &TransportOptions) -> Result<QuicOptions> {
        let mut quic = QuicOptions {
            lanes: options.lanes,
            bind: options.bind.clone(),
            mtu: options.mtu,
            waiting: options.waiting,
            ..QuicOptions::default()
        };
        if let Some(name) = &options.congestion {
            quic.congestion = name.parse()?;
        }
        Ok(quic)
    }

    pub(super) fn check(options: &TransportOptions) -> Result<()> {
        options_of(options)?.check()
    }

    pub(super) fn protected(
        kind: TransportKind,
        control: Arc<dyn Control>,
        options: &TransportOptions,
    ) -> Result<Connected> {
        let transport = QuicTransport::connect(&*control, &options_of(options)?, Deadline::after(options.timeout))?;
        over(kind, transport, control, options)
    }

    #[cfg(feature = "unprotected")]
    pub(super) fn unprotected(
        kind: TransportKind,
        control: Arc<dyn Control>,
        options: &TransportOptions,
    ) -> Result<Connected> {
        let deadline = Deadline::after(options.timeout);
        let transport = comm_quic::UnprotectedQuic::connect(&*control, &options_of(options)?, deadline)?;
        over(kind, transport, control, options)
    }

    #[cfg(not(feature = "unprotected"))]
    pub(super) fn unprotected(kind: TransportKind, _: Arc<dyn Control>, _: &TransportOptions) -> Result<Connected> {
        Err(absent(kind))
    }

    fn over(
        kind: TransportKind,
        transport: QuicTransport,
        control: Arc<dyn Control>,
        options: &TransportOptions,
    ) -> Result<Connected> {
        let monitor = transport.monitor();
        Ok(Connected { quic: Some(monitor), ..Connected::over(kind, transport, control, options)? })
    }
}

#[cfg(not(feature = "quic"))]
mod quic {
    use super::*;

    pub(super) fn check(_: &TransportOptions) -> Result<()> {
        Ok(())
    }

    pub(super) fn protected(kind: TransportKind, _: Arc<dyn Control>, _: &TransportOptions) -> Result<Connected> {
        Err(absent(kind))
    }

    pub(super) use protected as unprotected;
}

#[cfg(feature = "nccl")]
mod nccl {
    use comm_nccl::{NcclCommunicator, NcclOptions};

    use super::*;

    pub(super) fn missing() -> Option<String> {
        comm_nccl::available().err().map(|error| error.to_string())
    }

    pub(super) fn connect(
        kind: TransportKind,
        control: Arc<dyn Control>,
        options: &TransportOptions,
    ) -> Result<Connected> {
        let nccl = NcclOptions::default()
            .with_lanes(options.lanes)
            .with_device(options.cuda_device)
            .with_timeout(options.timeout)
            .with_stall_after(options.stall_after);
        let comm = NcclCommunicator::connect(control.clone(), &nccl, Deadline::after(options.timeout))?;
        let properties =
            Properties { cuda_device: Some(comm.device().ordinal()), settings: comm.facts(), ..Properties::of(kind) };
        Ok(Connected::new(Arc::new(comm), control, properties))
    }
}

#[cfg(not(feature = "nccl"))]
mod nccl {
    use super::*;

    pub(super) fn missing() -> Option<String> {
        lacks("nccl", false)
    }

    pub(super) fn connect(kind: TransportKind, _: Arc<dyn Control>, _: &TransportOptions) -> Result<Connected> {
        Err(absent(kind))
    }
}
