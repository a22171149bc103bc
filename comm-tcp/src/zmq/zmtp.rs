//! As much of ZMTP 3.0 (<https://rfc.zeromq.org/spec/23/>) as stands before the first message: the greeting of the NULL
//! mechanism and the READY command.

/// Bytes of a greeting.
pub(crate) const GREETING_LEN: usize = 64;

/// The greeting of ZMTP 3.0 with the NULL mechanism: signature, version, mechanism (20 bytes), not a server, filler.
pub(crate) const GREETING: [u8; GREETING_LEN] = {
    let mut greeting = [0; GREETING_LEN];
    greeting[0] = 0xff;
    greeting[9] = 0x7f;
    greeting[10] = 3;
    greeting[12] = b'N';
    greeting[13] = b'U';
    greeting[14] = b'L';
    greeting[15] = b'L';
    greeting
};

/// The flags of a command in a short frame (a length of one byte follows).
pub(crate) const SHORT_COMMAND: u8 = 0x04;

/// The identity in the body of a READY command of a DEALER; `None` for every other body.
///
/// Only what `zeromq` itself sends is let through: the properties `Socket-Type` and `Identity`, each once.
pub(crate) fn dealer_identity(body: &[u8]) -> Option<&[u8]> {
    let (name, mut rest) = counted(body)?;
    if name != b"READY" {
        return None;
    }
    let (mut socket_type, mut identity) = (None, None);
    while !rest.is_empty() {
        let (property, after) = counted(rest)?;
        let (length, after) = after.split_first_chunk::<4>()?;
        let (value, after) = after.split_at_checked(usize::try_from(u32::from_be_bytes(*length)).ok()?)?;
        let slot = match property {
            b"Socket-Type" => &mut socket_type,
            b"Identity" => &mut identity,
            _ => return None,
        };
        if slot.replace(value).is_some() {
            return None;
        }
        rest = after;
    }
    (socket_type == Some(b"DEALER")).then_some(identity).flatten()
}

/// A string with its length in one byte before it, and what follows.
fn counted(bytes: &[u8]) -> Option<(&[u8], &[u8])> {
    let (length, rest) = bytes.split_first()?;
    rest.split_at_checked(usize::from(*length))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ready(properties: &[(&str, &[u8])]) -> Vec<u8> {
        let mut body = b"\x05READY".to_vec();
        for (name, value) in properties {
            body.push(u8::try_from(name.len()).unwrap());
            body.extend_from_slice(name.as_bytes());
            body.extend_from_slice(&u32::try_from(value.len()).unwrap().to_be_bytes());
            body.extend_from_slice(value);
        }
        body
    }

    #[test]
    fn the_properties_may_come_in_any_order() {
        let (socket_type, identity) = (("Socket-Type", &b"DEALER"[..]), ("Identity", &b"abc"[..]));
        assert_eq!(dealer_identity(&ready(&[socket_type, identity])), Some(&b"abc"[..]));
        assert_eq!(dealer_identity(&ready(&[identity, socket_type])), Some(&b"abc"[..]));
    }

    #[test]
    fn everything_else_is_refused() {
        let (socket_type, identity) = (("Socket-Type", &b"DEALER"[..]), ("Identity", &b"abc"[..]));
        let good = ready(&[socket_type, identity]);
        for cut in 0..good.len() {
            assert_eq!(dealer_identity(&good[..cut]), None, "cut at {cut}");
        }
        for properties in [
            &[socket_type][..],
            &[identity],
            &[identity, ("Socket-Type", b"ROUTER")],
            &[identity, socket_type, identity],
            &[identity, socket_type, ("Resource", b"x")],
        ] {
            assert_eq!(dealer_identity(&ready(properties)), None, "{properties:?}");
        }
        assert_eq!(dealer_identity(b"\x05ERROR"), None);
        assert_eq!(dealer_identity(b"\xff"), None);
    }
}
