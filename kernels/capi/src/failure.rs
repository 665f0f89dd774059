//! Status codes and the calling thread's last error message.

use std::cell::RefCell;
use std::ffi::{CString, c_char};

use semmoe_kernels::KernelError;
use semmoe_ranks::RankError;

/// The nonzero status codes of the header.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(i32)]
pub(crate) enum Code {
    Invalid = 1,
    OutOfRange = 2,
    Misaligned = 3,
    TooLarge = 4,
    Disagree = 5,
    TimedOut = 6,
    PeerFailed = 7,
    NotBuilt = 8,
    #[cfg_attr(not(feature = "launcher"), allow(dead_code, reason = "only the CUDA backend returns it"))]
    Device = 9,
    Busy = 10,
    Internal = 11,
}

/// Why a call was rejected or failed.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Failure {
    pub(crate) code: Code,
    pub(crate) message: String,
}

impl Failure {
    pub(crate) fn new(code: Code, message: impl Into<String>) -> Self {
        Self { code, message: message.into() }
    }

    pub(crate) fn invalid(message: impl Into<String>) -> Self {
        Self::new(Code::Invalid, message)
    }
}

impl From<RankError> for Failure {
    fn from(error: RankError) -> Self {
        let code = match &error {
            RankError::Operands(KernelError::OutOfRange { .. } | KernelError::Twice { .. }) => Code::OutOfRange,
            RankError::Operands(KernelError::Descending { .. } | KernelError::NoPairs { .. })
            | RankError::NoSuchRank { .. } => Code::OutOfRange,
            RankError::Operands(_) | RankError::World { .. } | RankError::Joined { .. } => Code::Invalid,
            RankError::Overlap { .. } | RankError::Memory { .. } => Code::Invalid,
            RankError::Misaligned { .. } => Code::Misaligned,
            RankError::TooLarge { .. } | RankError::Capacity { .. } => Code::TooLarge,
            RankError::Disagree { .. } => Code::Disagree,
            RankError::TimedOut { .. } => Code::TimedOut,
            RankError::Left { .. } | RankError::GaveUp { .. } => Code::PeerFailed,
        };
        Self::new(code, error.to_string())
    }
}

impl From<KernelError> for Failure {
    fn from(error: KernelError) -> Self {
        RankError::from(error).into()
    }
}

thread_local! {
    static LAST: RefCell<CString> = RefCell::default();
}

/// Stores the message for this thread and returns the status.
pub(crate) fn keep(failure: &Failure) -> i32 {
    let message = CString::new(failure.message.replace('\0', " ")).unwrap_or_default();
    LAST.with(|last| *last.borrow_mut() = message);
    failure.code as i32
}

/// Returns the message, valid until this thread's next failure; empty if there was none.
pub(crate) fn last() -> *const c_char {
    LAST.with(|last| last.borrow().as_ptr())
}
