//! The section with the addresses at which importers of other hosts reach the exporter.

use std::net::{IpAddr, Ipv6Addr, SocketAddr};

use zerocopy::network_endian::U16;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use super::DescriptorError;
use super::section::{self, bad};

/// Maximum number of addresses.
pub(crate) const MAX_ADDRESSES: usize = 8;

/// Both numbers are in network byte order. An IPv4 address is written as an IPv6 address (RFC 4291 §2.5.5.2).
#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct AddressEntry {
    ip: [u8; 16],
    port: U16,
}

/// Returns the size of the section's body in bytes.
pub(super) const fn body_bytes(addresses: &[SocketAddr]) -> usize {
    size_of_val(addresses) / size_of::<SocketAddr>() * size_of::<AddressEntry>()
}

pub(super) fn write(addresses: &[SocketAddr], bytes: &mut Vec<u8>) {
    section::begin_optional(section::NETWORK, body_bytes(addresses), bytes);
    for address in addresses {
        let ip = match address.ip() {
            IpAddr::V4(ip) => ip.to_ipv6_mapped(),
            IpAddr::V6(ip) => ip,
        };
        let entry = AddressEntry { ip: ip.octets(), port: U16::new(address.port()) };
        bytes.extend_from_slice(entry.as_bytes());
    }
}

/// Reads the whole body.
pub(super) fn read(body: &mut &[u8]) -> Result<Vec<SocketAddr>, DescriptorError> {
    let entries = <[AddressEntry]>::ref_from_bytes(body)
        .map_err(|_| bad("network addresses", "their section is cut off"))?;
    if entries.is_empty() || entries.len() > MAX_ADDRESSES {
        return Err(bad(
            "network addresses",
            &format!("there are {}, not 1 to {MAX_ADDRESSES}", entries.len()),
        ));
    }
    *body = &[];
    entries.iter().map(read_address).collect()
}

fn read_address(entry: &AddressEntry) -> Result<SocketAddr, DescriptorError> {
    let ip = Ipv6Addr::from(entry.ip).to_canonical();
    let address = SocketAddr::new(ip, entry.port.get());
    if is_reachable(address) {
        return Ok(address);
    }
    Err(bad("network addresses", &format!("{address} is not the address of a process")))
}

/// Returns whether an address can be that of a process.
pub(crate) fn is_reachable(address: SocketAddr) -> bool {
    address.port() != 0 && !address.ip().is_unspecified() && !address.ip().is_multicast()
}

#[cfg(test)]
mod tests;
