//! Detects at run time which instruction set to use.

use std::sync::OnceLock;

/// An instruction set.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Isa {
    /// AVX-512 F, BW, DQ, VL.
    #[cfg(target_arch = "x86_64")]
    Avx512,
    /// AVX2 and FMA.
    #[cfg(target_arch = "x86_64")]
    Avx2,
    /// The compiler's baseline.
    Portable,
}

impl Isa {
    /// Returns all instruction sets that this machine supports, best first.
    #[cfg(target_arch = "x86_64")]
    pub(super) fn available() -> impl Iterator<Item = Self> {
        let avx2 = is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma");
        let avx512 = avx2
            && is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("avx512dq")
            && is_x86_feature_detected!("avx512vl");
        [(avx512, Self::Avx512), (avx2, Self::Avx2), (true, Self::Portable)]
            .into_iter()
            .filter_map(|(available, isa)| available.then_some(isa))
    }

    /// Returns all instruction sets that this machine supports, best first.
    #[cfg(not(target_arch = "x86_64"))]
    pub(super) fn available() -> impl Iterator<Item = Self> {
        std::iter::once(Self::Portable)
    }

    /// Returns the best instruction set that this machine supports.
    pub(super) fn best() -> Self {
        static BEST: OnceLock<Isa> = OnceLock::new();
        *BEST.get_or_init(|| Self::available().next().unwrap_or(Self::Portable))
    }

    /// Whether tiles of few rows are narrower than the groups of B.
    pub(super) fn has_narrow_tiles(self) -> bool {
        match self {
            #[cfg(target_arch = "x86_64")]
            Self::Avx512 => false,
            #[cfg(target_arch = "x86_64")]
            Self::Avx2 => true,
            Self::Portable => false,
        }
    }

    /// The instruction set's name in reports.
    pub(super) fn name(self) -> &'static str {
        match self {
            #[cfg(target_arch = "x86_64")]
            Self::Avx512 => "avx512",
            #[cfg(target_arch = "x86_64")]
            Self::Avx2 => "avx2",
            Self::Portable => "portable",
        }
    }
}

/// Compiles each function for every instruction set and selects one version at each call. The bodies are ordinary safe
/// code without fused multiply-add, so all versions produce identical bits; only the vector width differs.
macro_rules! by_isa {
    ($(
        $(#[$doc:meta])* pub fn $name:ident($($arg:ident: $type:ty),* $(,)?) $(-> $result:ty)? $body:block
    )*) => {$(
        $(#[$doc])*
        pub(in crate::model) fn $name($($arg: $type),*) $(-> $result)? {
            #[inline(always)]
            fn body($($arg: $type),*) $(-> $result)? $body

            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
            fn avx512($($arg: $type),*) $(-> $result)? {
                body($($arg),*)
            }

            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx2,fma")]
            fn avx2($($arg: $type),*) $(-> $result)? {
                body($($arg),*)
            }

            match $crate::model::compute::isa::Isa::best() {
                // SAFETY: `best` returns only instruction sets detected on this machine.
                #[cfg(target_arch = "x86_64")]
                $crate::model::compute::isa::Isa::Avx512 => unsafe { avx512($($arg),*) },
                // SAFETY: see above.
                #[cfg(target_arch = "x86_64")]
                $crate::model::compute::isa::Isa::Avx2 => unsafe { avx2($($arg),*) },
                $crate::model::compute::isa::Isa::Portable => body($($arg),*),
            }
        }
    )*};
}
pub(super) use by_isa;
