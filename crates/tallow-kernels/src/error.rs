//! What a user can get wrong about a shape.

/// A shape or configuration that no kernel can run.
#[non_exhaustive]
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum Error {
    /// A size that must be at least one is zero.
    #[error("{op}: {what} is 0, it must be at least 1")]
    Zero {
        /// The operation.
        op: &'static str,
        /// The size that is zero.
        what: &'static str,
    },
    /// Channel counts that do not fit together.
    #[error(
        "conv2d: input has {in_channels} channels and weight is {weight:?} with {groups} groups; \
         in_channels must be weight[1] * groups and weight[0] a multiple of groups"
    )]
    Channels {
        /// Channels of the input.
        in_channels: usize,
        /// Shape of the weight.
        weight: [usize; 4],
        /// Number of groups.
        groups: usize,
    },
    /// The window is larger than the padded input.
    #[error("{op}: a window of {window} does not fit the padded {axis} of {padded}")]
    Window {
        /// The operation.
        op: &'static str,
        /// `height` or `width`.
        axis: &'static str,
        /// Extent of the window, dilation included.
        window: usize,
        /// Extent of the input, padding included.
        padded: usize,
    },
    /// Padding above half the window: some windows would see no element.
    #[error("{op}: padding {padding} is more than half of kernel {kernel}")]
    Padding {
        /// The operation.
        op: &'static str,
        /// Padding on one side.
        padding: usize,
        /// Kernel extent on that axis.
        kernel: usize,
    },
    /// A tensor of these sizes has more elements than memory has addresses.
    #[error("{op}: the sizes {dims:?} overflow")]
    TooLarge {
        /// The operation.
        op: &'static str,
        /// The sizes.
        dims: Vec<usize>,
    },
    /// Batch statistics of a single value have no variance.
    #[error(
        "batch norm: one value per channel in {shape:?} (batch, channels, pixels); training needs more"
    )]
    OneValuePerChannel {
        /// Batch, channels, pixels.
        shape: [usize; 3],
    },
}
