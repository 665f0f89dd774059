//! Compiled kernels: their target GPUs, and the images that this build embeds.

/// The targets that the kernels are compiled for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Target {
    /// CUBIN for A100 and other GPUs of capability 8.x.
    Sm80,
    /// CUBIN for H100, H200.
    Sm90,
    /// CUBIN for B200.
    Sm100,
    /// PTX that drivers compile for newer GPUs.
    Ptx90,
}

impl Target {
    /// All targets.
    pub const ALL: [Self; 4] = [Self::Sm80, Self::Sm90, Self::Sm100, Self::Ptx90];

    /// Returns the name that NVRTC's `--gpu-architecture` expects.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Sm80 => "sm_80",
            Self::Sm90 => "sm_90",
            Self::Sm100 => "sm_100",
            Self::Ptx90 => "compute_90",
        }
    }

    /// Returns the name of the image file.
    pub const fn file_name(self) -> &'static str {
        match self {
            Self::Sm80 => "sm_80.cubin",
            Self::Sm90 => "sm_90.cubin",
            Self::Sm100 => "sm_100.cubin",
            Self::Ptx90 => "compute_90.ptx",
        }
    }

    /// Compute capability x 10.
    pub const fn capability(self) -> u32 {
        match self {
            Self::Sm80 => 80,
            Self::Sm90 | Self::Ptx90 => 90,
            Self::Sm100 => 100,
        }
    }

    /// Returns the target for a GPU of this capability (x 10); `None` if the GPU is too old. A CUBIN runs on later
    /// minor capabilities of its major one.
    pub const fn for_capability(capability: u32) -> Option<Self> {
        match capability {
            0..80 => None,
            80..90 => Some(Self::Sm80),
            90..100 => Some(Self::Sm90),
            100..110 => Some(Self::Sm100),
            _ => Some(Self::Ptx90),
        }
    }
}

/// Returns the image for a target, if this crate was built with `SEMMOE_KERNEL_IMAGES`.
pub fn embedded(target: Target) -> Option<&'static [u8]> {
    IMAGES.get(target as usize).copied()
}

/// The images in the order of [`Target::ALL`]; empty if none are embedded.
const IMAGES: &[&[u8]] = include!(concat!(env!("OUT_DIR"), "/images.rs"));

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_capability_has_its_target() {
        let expected = [(75, None), (80, Some("sm_80")), (89, Some("sm_80")), (90, Some("sm_90"))];
        let newer = [(100, Some("sm_100")), (103, Some("sm_100")), (120, Some("compute_90"))];
        for (capability, name) in expected.into_iter().chain(newer) {
            assert_eq!(Target::for_capability(capability).map(Target::name), name, "{capability}");
        }
    }
}
