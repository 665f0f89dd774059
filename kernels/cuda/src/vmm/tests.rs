//! A driver that only keeps books: everything created must be undone, in the right order, at every failure.

use std::cell::{Cell, RefCell};
use std::fs::File;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use super::{Addresses, Handle, Handles, MAX_BYTES, Memory, Multicast, VirtualMemory, VmmError};
use crate::error::LaunchError;

const UNIT: u64 = 2 << 20;
const MULTICAST_UNIT: u64 = 32 << 20;

#[derive(Default)]
struct Books {
    calls: RefCell<Vec<String>>,
    /// The number of the call to refuse, counted from 1; 0: none.
    refuses: Cell<usize>,
    no_multicast: bool,
    odd_unit: Cell<u64>,
    next: Cell<u64>,
}

impl Books {
    fn refusing(call: usize) -> Self {
        Self { refuses: Cell::new(call), ..Self::default() }
    }

    fn record(&self, call: String) -> Result<u64, String> {
        self.calls.borrow_mut().push(call);
        if self.calls.borrow().len() == self.refuses.get() {
            return Err("out of luck".to_owned());
        }
        self.next.set(self.next.get() + 1);
        Ok(self.next.get())
    }

    /// Resources created and not released, paired by kind of call.
    fn left(&self) -> Vec<String> {
        let calls = self.calls.borrow();
        let refused = self.refuses.get();
        let done: Vec<&String> =
            calls.iter().enumerate().filter(|&(at, _)| at + 1 != refused).map(|(_, call)| call).collect();
        let mut left = Vec::new();
        for (made, undone) in [("reserve", "free"), ("map", "unmap"), ("bind", "unbind")] {
            let count = |name: &str| done.iter().filter(|call| call.split(' ').next() == Some(name)).count();
            if count(made) != count(undone) {
                left.push(format!("{made} {} times, {undone} {} times", count(made), count(undone)));
            }
        }
        let handles = done.iter().filter(|call| call.starts_with("create") || call.starts_with("import")).count();
        let released = done.iter().filter(|call| call.starts_with("release")).count();
        if handles != released {
            left.push(format!("{handles} handles, {released} released"));
        }
        left
    }

    fn names(&self) -> Vec<String> {
        self.calls.borrow().iter().map(|call| call.split(' ').next().unwrap_or_default().to_owned()).collect()
    }
}

impl Handles for Books {
    type Error = String;

    fn granularity(&self, multicast_devices: Option<u32>) -> Result<u64, Self::Error> {
        self.record(format!("granularity {multicast_devices:?}"))?;
        let unit = if multicast_devices.is_some() { MULTICAST_UNIT } else { UNIT };
        Ok(if self.odd_unit.get() == 0 { unit } else { self.odd_unit.get() })
    }
    fn create(&self, bytes: u64) -> Result<Handle, Self::Error> {
        self.record(format!("create {bytes}"))
    }
    fn export(&self, handle: Handle) -> Result<OwnedFd, Self::Error> {
        self.record(format!("export {handle}"))?;
        File::open("/dev/null").map(OwnedFd::from).map_err(|error| error.to_string())
    }
    fn import(&self, _file: BorrowedFd<'_>) -> Result<Handle, Self::Error> {
        self.record("import".to_owned())
    }
    fn release(&self, handle: Handle) -> Result<(), Self::Error> {
        self.record(format!("release {handle}")).map(|_| ())
    }
}

impl Addresses for Books {
    fn reserve(&self, bytes: u64, alignment: u64) -> Result<u64, Self::Error> {
        self.record(format!("reserve {bytes} {alignment}")).map(|number| number << 40)
    }
    fn map(&self, address: u64, bytes: u64, handle: Handle) -> Result<(), Self::Error> {
        self.record(format!("map {address} {bytes} {handle}")).map(|_| ())
    }
    fn grant(&self, address: u64, bytes: u64) -> Result<(), Self::Error> {
        self.record(format!("grant {address} {bytes}")).map(|_| ())
    }
    fn unmap(&self, address: u64, bytes: u64) -> Result<(), Self::Error> {
        self.record(format!("unmap {address} {bytes}")).map(|_| ())
    }
    fn free(&self, address: u64, bytes: u64) -> Result<(), Self::Error> {
        self.record(format!("free {address} {bytes}")).map(|_| ())
    }
}

impl VirtualMemory for Books {
    fn has_multicast(&self) -> bool {
        !self.no_multicast
    }
    fn create_multicast(&self, devices: u32, bytes: u64) -> Result<Handle, Self::Error> {
        self.record(format!("create_multicast {devices} {bytes}"))
    }
    fn add_device(&self, multicast: Handle) -> Result<(), Self::Error> {
        self.record(format!("add_device {multicast}")).map(|_| ())
    }
    fn bind(&self, multicast: Handle, memory: Handle, bytes: u64) -> Result<(), Self::Error> {
        self.record(format!("bind {multicast} {memory} {bytes}")).map(|_| ())
    }
    fn unbind(&self, multicast: Handle, bytes: u64) -> Result<(), Self::Error> {
        self.record(format!("unbind {multicast} {bytes}")).map(|_| ())
    }
}

/// Everything a rank does: own memory, a multicast object, binding.
fn all_of_it(driver: &Books) -> Result<(), VmmError> {
    let memory = Memory::new(driver, 5 << 20, Some(4))?;
    assert_eq!(memory.buffer().bytes, MULTICAST_UNIT);
    let file = memory.export()?;
    let peer = Memory::import(driver, file.as_fd(), memory.buffer().bytes)?;
    assert_ne!(peer.buffer().address, memory.buffer().address);
    let mut object = Multicast::new(driver, 4, 5 << 20)?;
    object.add_device()?;
    let place = object.bind(&memory)?;
    assert_eq!((place.bytes, object.bytes()), (MULTICAST_UNIT, MULTICAST_UNIT));
    assert_eq!(object.bind(&memory)?, place, "bound and mapped once");
    Ok(())
}

#[test]
fn what_was_made_is_undone_whichever_call_is_refused() {
    let driver = Books::default();
    all_of_it(&driver).unwrap();
    assert_eq!(driver.left(), [""; 0]);
    let undone = ["unmap", "free", "unbind", "release", "unmap", "free", "release", "unmap", "free", "release"];
    assert_eq!(driver.names()[driver.names().len() - undone.len()..], undone);
    // Up to the first undoing call: nothing else can fail.
    let calls = driver.names().iter().position(|name| name == "unmap").unwrap();
    assert_eq!(calls, 19);
    for refused in 1..=calls {
        let driver = Books::refusing(refused);
        let error = all_of_it(&driver).unwrap_err().to_string();
        assert!(error.starts_with("the CUDA driver refused ") && error.ends_with(": out of luck"), "{error}");
        assert_eq!(driver.left(), [""; 0], "call {refused} was refused");
    }
}

#[test]
fn sizes_that_cannot_be_are_refused_before_any_call() {
    let driver = Books::default();
    let file = File::open("/dev/null").unwrap();
    for bytes in [0, MAX_BYTES + 1, u64::MAX] {
        let refused = Memory::new(&driver, bytes, None).map(drop);
        assert!(
            matches!(refused, Err(VmmError::Size(LaunchError::OutOfRange { found, .. })) if found == bytes),
            "{refused:?}"
        );
        assert!(Memory::import(&driver, file.as_fd(), bytes).is_err());
        assert!(Multicast::new(&driver, 2, bytes).is_err());
        assert!(Multicast::import(&driver, file.as_fd(), 2, bytes).is_err());
    }
    for devices in [0, 65] {
        assert!(Multicast::new(&driver, devices, UNIT).is_err());
    }
    assert_eq!(driver.names(), [""; 0]);
    let error = Memory::import(&driver, file.as_fd(), UNIT + 1).err().unwrap();
    assert_eq!(error.to_string(), "memory of another process has 2097153 bytes, expected a multiple of 2097152");
    assert!(matches!(Multicast::import(&driver, file.as_fd(), 2, UNIT), Err(VmmError::Granularity { .. })));
    assert_eq!(driver.names(), ["granularity", "granularity"], "nothing was made");
}

#[test]
fn a_driver_that_says_nonsense_is_not_believed() {
    let driver = Books::default();
    for unit in [3, u64::MAX, MAX_BYTES * 2] {
        driver.odd_unit.set(unit);
        let error = Memory::new(&driver, 100, None).err().unwrap().to_string();
        assert!(error.contains(&format!("{unit} bytes, expected a power of two")), "{error}");
    }
    assert!(driver.names().iter().all(|name| name == "granularity"));
}

#[test]
fn the_steps_of_a_multicast_object_have_an_order() {
    let driver = Books::default();
    let (small, memory) = (Memory::new(&driver, 1, None).unwrap(), Memory::new(&driver, UNIT, Some(2)).unwrap());
    let mut object = Multicast::new(&driver, 2, 1).unwrap();
    let error = object.bind(&memory).unwrap_err().to_string();
    assert_eq!(error, "adding the GPU must precede binding its memory on a multicast object");
    object.add_device().unwrap();
    object.add_device().unwrap();
    assert_eq!(driver.names().iter().filter(|name| *name == "add_device").count(), 1);
    let error = object.bind(&small).unwrap_err();
    let expected = LaunchError::OutOfRange {
        what: "size of the memory to bind",
        found: UNIT,
        least: MULTICAST_UNIT,
        most: MAX_BYTES,
    };
    assert_eq!(error, VmmError::Size(expected));
    object.bind(&memory).unwrap();
}

#[test]
fn a_gpu_without_multicast_says_so() {
    let driver = Books { no_multicast: true, ..Books::default() };
    let file = File::open("/dev/null").unwrap();
    assert_eq!(Multicast::new(&driver, 2, UNIT).err(), Some(VmmError::NoMulticast));
    assert_eq!(Multicast::import(&driver, file.as_fd(), 2, UNIT).err(), Some(VmmError::NoMulticast));
    assert_eq!(Memory::new(&driver, 100, Some(2)).err(), Some(VmmError::NoMulticast));
    assert!(Memory::new(&driver, 100, None).is_ok());
}

/// A bind that the driver refused can be retried, as when another rank was late.
#[test]
fn a_refused_bind_can_be_tried_again() {
    let driver = Books::default();
    let memory = Memory::new(&driver, 1, Some(2)).unwrap();
    let mut object = Multicast::new(&driver, 2, 1).unwrap();
    object.add_device().unwrap();
    driver.refuses.set(driver.calls.borrow().len() + 1);
    assert!(object.bind(&memory).is_err());
    assert!(object.bind(&memory).is_ok());
    let refuse_map = driver.calls.borrow().len();
    assert_eq!(driver.names()[refuse_map - 3..], ["reserve", "map", "grant"]);
}
