//! Which calls use the switch, and what is rejected.

use std::ffi::CStr;
use std::sync::atomic::Ordering;

use super::record::{BUFFER_BYTES, Fixture, array, call, device};
use super::{gather, scatter};
use crate::abi::{self, Multicast};
use crate::failure::Code;

const ADDRESS: usize = 40;

fn through(operations: u32) -> Multicast {
    Multicast {
        struct_bytes: size_of::<Multicast>() as u64,
        address: array(ADDRESS),
        bytes: BUFFER_BYTES,
        operations,
        reserved: 0,
    }
}

fn off() -> Multicast {
    Multicast { address: std::ptr::null_mut(), bytes: 0, ..through(0) }
}

fn set(fixture: &Fixture, args: &Multicast) -> i32 {
    // SAFETY: the communicator is alive; the address is never dereferenced.
    unsafe { crate::semmoe_multicast(fixture.comm, args) }
}

fn capable() -> Fixture {
    let fixture = Fixture::new();
    fixture.seen.multicast.store(true, Ordering::Relaxed);
    fixture
}

/// The kernel of a call, and the multicast address among its parameters.
fn kernels(fixture: &Fixture) -> [(&'static str, bool); 2] {
    let contains = |params: &[u8], address: u64| params.windows(8).any(|bytes| bytes == address.to_ne_bytes());
    assert_eq!(call!(fixture, semmoe_reduce_scatter, &scatter()), abi::OK);
    let reduce = fixture.one();
    assert_eq!(call!(fixture, semmoe_allgather, &gather()), abi::OK);
    let gather = fixture.one();
    let at = |offset: u64| device(ADDRESS) as u64 + offset;
    [(reduce.kernel(), contains(reduce.params(), at(256))), (gather.kernel(), contains(gather.params(), at(512)))]
}

#[test]
fn calls_go_through_the_switch_as_asked() {
    let fixture = capable();
    let (peers, switch) = (("semmoe_srs_bf16", false), ("semmoe_srs_nvls_bf16", true));
    let (pushes, copies) = (("semmoe_sag_2", false), ("semmoe_sag_nvls_2", true));
    assert_eq!(kernels(&fixture), [peers, pushes], "not at first");
    for (operations, expected) in [(1, [switch, pushes]), (2, [peers, copies]), (3, [switch, copies])] {
        assert_eq!(set(&fixture, &through(operations)), abi::OK);
        assert_eq!(kernels(&fixture), expected);
    }
    // The fused norm and rows of 14 bytes use the peers.
    let mut args = scatter();
    (args.residual, args.norm_weight, args.residual_out) = (array(23), array(24), array(25));
    assert_eq!(call!(fixture, semmoe_reduce_scatter, &args), abi::OK);
    assert_eq!(fixture.one().kernel(), "semmoe_srs_norm_bf16");
    assert_eq!(call!(fixture, semmoe_reduce_scatter, &abi::ReduceScatter { hidden: 7, ..scatter() }), abi::OK);
    assert_eq!(fixture.one().kernel(), "semmoe_srs_bf16");
    assert_eq!(set(&fixture, &off()), abi::OK);
    assert_eq!(kernels(&fixture), [peers, pushes], "no longer");
}

#[test]
fn what_cannot_be_a_multicast_address_is_refused() {
    let fixture = capable();
    assert_eq!(set(&fixture, &through(3)), abi::OK);
    let refused = |args: Multicast, code: Code| assert_eq!(set(&fixture, &args), code as i32, "{args:?}");
    refused(Multicast { operations: 4, ..through(0) }, Code::Invalid);
    refused(Multicast { reserved: 1, ..through(1) }, Code::Invalid);
    refused(Multicast { address: array(ADDRESS), ..off() }, Code::Invalid);
    refused(Multicast { address: std::ptr::null_mut(), ..through(1) }, Code::Invalid);
    refused(
        Multicast { address: std::ptr::without_provenance_mut(device(ADDRESS) + 8), ..through(1) },
        Code::Misaligned,
    );
    refused(Multicast { bytes: BUFFER_BYTES - 1, ..through(1) }, Code::TooLarge);
    refused(Multicast { address: std::ptr::without_provenance_mut(usize::MAX - 15), ..through(1) }, Code::TooLarge);
    refused(Multicast { struct_bytes: 8, ..through(1) }, Code::Invalid);
    assert_eq!(kernels(&fixture)[0].0, "semmoe_srs_nvls_bf16", "as before");
    assert!(fixture.launches().is_empty());
}

#[test]
fn a_gpu_without_multicast_is_asked_for_none() {
    let fixture = Fixture::new();
    // SAFETY: the communicator is alive.
    let has = || unsafe { crate::semmoe_has_multicast(fixture.comm) };
    assert_eq!(has(), 0);
    assert_eq!(set(&fixture, &through(1)), Code::Device as i32);
    // SAFETY: a terminated string, valid until this thread's next failure.
    let message = unsafe { CStr::from_ptr(crate::semmoe_last_error()) }.to_str().expect("UTF-8");
    assert_eq!(message, "the GPU has no multicast support");
    assert_eq!(kernels(&fixture)[0].0, "semmoe_srs_bf16");
    fixture.seen.multicast.store(true, Ordering::Relaxed);
    assert_eq!(has(), 1);
    // SAFETY: null is rejected.
    assert_eq!(unsafe { crate::semmoe_has_multicast(std::ptr::null_mut()) }, 0);
}
