//! What the kernel says of a socket by the number of its descriptor, for sockets that another library keeps to itself.

use std::io;
use std::net::SocketAddr;
use std::os::fd::RawFd;

use socket2::SockAddr;

/// The state of a TCP socket as the kernel numbers it; `None` where there is no such socket (any more).
pub(crate) fn tcp_state(descriptor: RawFd) -> Option<u8> {
    let (mut state, mut length) = (0_u8, 1);
    // SAFETY: the kernel writes at most as many bytes to `state` as `length` says, which is its size, and then their number to `length`; both
    // outlive the call. Whatever the number stands for by now is only asked: nothing is changed, closed or kept of it.
    let outcome = unsafe {
        libc::getsockopt(descriptor, libc::IPPROTO_TCP, libc::TCP_INFO, (&raw mut state).cast(), &raw mut length)
    };
    (outcome == 0 && length == 1).then_some(state)
}

/// The address of a socket's own end; `None` where there is none.
pub(crate) fn local_address(descriptor: RawFd) -> Option<SocketAddr> {
    address(descriptor, libc::getsockname)
}

/// The address of the other end of a socket that is connected; `None` where there is none.
pub(crate) fn remote_address(descriptor: RawFd) -> Option<SocketAddr> {
    address(descriptor, libc::getpeername)
}

type AddressOf = unsafe extern "C" fn(libc::c_int, *mut libc::sockaddr, *mut libc::socklen_t) -> libc::c_int;

fn address(descriptor: RawFd, ask: AddressOf) -> Option<SocketAddr> {
    // SAFETY: `ask` is one of the two functions above. They write an address of at most as many bytes as the length says, which is that of the
    // storage, and then its length, both of which are `try_init`'s; where they fail, nothing is taken for an address. The number itself is only
    // asked, as in `tcp_state`.
    let outcome = unsafe {
        SockAddr::try_init(|storage, length| match ask(descriptor, storage.cast(), length) {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        })
    };
    outcome.ok()?.1.as_socket()
}
