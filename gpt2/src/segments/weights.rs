//! Between flat vectors and the tensors of the module tree.

use std::sync::Arc;

use burn::backend::TensorMetadata;
use burn::backend::autodiff::NodeId;
use burn::backend::flex::FlexTensor;
use burn::module::{Module, ModuleMapper, ModuleVisitor, Param};
use burn::tensor::{Device, FloatDType, Shape, Tensor, TensorData};
use comm_core::{Buffer, Element, bf16, f16};

use super::error::ModelError;
use super::layout::SegmentInfo;
use crate::devices::{self, Placement};
use crate::flat::upload;
use crate::fused::{self, Resident};
use crate::precision::{Precision, split};

pub(super) fn read_back<const D: usize>(
    segment: usize,
    what: &'static str,
    tensor: Tensor<D>,
) -> Result<Vec<f32>, ModelError> {
    tensor.try_into_vec_as::<f32>().map_err(|error| ModelError::Device {
        segment,
        what,
        detail: devices::reason(error),
    })
}

#[derive(Default)]
pub(super) struct Flatten {
    pub(super) parts: Vec<Tensor<1>>,
}

impl ModuleVisitor for Flatten {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        self.parts.push(param.val().cast(FloatDType::F32).reshape([-1]));
    }
}

/// Puts new values into a segment's tensors, in visit order. The agreement of the layout with the module tree is tested.
pub(super) struct Upload<'a> {
    device: &'a Device,
    tensors: Tensors,
}

enum Tensors {
    /// In host memory tensors of f32 are views of the one vector that the optimizer updates.
    Views { flat: Box<FlexTensor>, shapes: std::vec::IntoIter<Shape>, next: usize },
    /// In host memory each tensor of 16 bits gets its own piece, since the backend's kernels copy views that do not start at zero.
    Pieces(std::vec::IntoIter<TensorData>),
    /// Device memory takes one transfer and is cut apart there.
    Transferred { flat: Box<Tensor<1>>, shapes: std::vec::IntoIter<Shape>, next: usize },
}

impl<'a> Upload<'a> {
    /// `flat` is on the device and as long as the segment, which the caller has checked.
    pub(super) fn cut(flat: Tensor<1>, precision: Precision, info: &SegmentInfo, device: &'a Device) -> Self {
        let shapes: Vec<Shape> = info.params.iter().map(|param| Shape::from(param.shape.clone())).collect();
        let flat = Box::new(flat.cast(precision.float()));
        Self { device, tensors: Tensors::Transferred { flat, shapes: shapes.into_iter(), next: 0 } }
    }

    /// The first elements of a segment that was transferred, as rows, without a copy; `None` where there are fewer.
    pub(super) fn first_rows(&self, [rows, cols]: [usize; 2]) -> Option<Tensor<2>> {
        let Tensors::Transferred { flat, .. } = &self.tensors else { return None };
        let all = flat.dims()[0];
        (rows * cols <= all).then(|| (**flat).clone().narrow(0, 0, rows * cols).reshape([rows, cols]))
    }

    /// Views of `flat`, which holds f32 in host memory and is as long as the segment.
    pub(super) fn views(flat: FlexTensor, info: &SegmentInfo, device: &'a Device) -> Self {
        let shapes: Vec<Shape> = info.params.iter().map(|param| Shape::from(param.shape.clone())).collect();
        Self { device, tensors: Tensors::Views { flat: Box::new(flat), shapes: shapes.into_iter(), next: 0 } }
    }

    /// `flat` is of type `precision` and as long as the segment, which the caller has checked. At no time are more than the segment
    /// and one of its tensors held.
    pub(super) fn new(
        flat: Buffer,
        precision: Precision,
        info: &SegmentInfo,
        device: &'a Device,
    ) -> comm_core::Result<Self> {
        let shapes: Vec<Shape> = info.params.iter().map(|param| Shape::from(param.shape.clone())).collect();
        let tensors = match Placement::of(device) {
            Placement::Host => {
                let lengths: Vec<usize> = info.params.iter().map(|param| param.len).collect();
                let pieces = match precision {
                    Precision::F32 => pieces(flat.into_vec::<f32>()?, &lengths, &shapes),
                    Precision::Bf16 => pieces(flat.into_vec::<bf16>()?, &lengths, &shapes),
                    Precision::F16 => pieces(flat.into_vec::<f16>()?, &lengths, &shapes),
                };
                Tensors::Pieces(pieces.into_iter())
            }
            Placement::Device => {
                let flat = Box::new(upload(flat, precision, device)?);
                Tensors::Transferred { flat, shapes: shapes.into_iter(), next: 0 }
            }
        };
        Ok(Self { device, tensors })
    }
}

fn pieces<T: Element + burn::tensor::Element>(flat: Vec<T>, lengths: &[usize], shapes: &[Shape]) -> Vec<TensorData> {
    split(flat, lengths).into_iter().zip(shapes).map(|(piece, shape)| TensorData::new(piece, shape.clone())).collect()
}

impl ModuleMapper for Upload<'_> {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let value = match &mut self.tensors {
            Tensors::Views { flat, shapes, next } => shapes.next().map(|shape| {
                let start = flat.layout().start_offset() + *next;
                *next += shape.num_elements();
                fused::view(flat, shape, start)
            }),
            Tensors::Pieces(pieces) => pieces.next().map(|data| {
                let dtype = data.dtype();
                Tensor::from_data(data, (self.device, dtype))
            }),
            Tensors::Transferred { flat, shapes, next } => shapes.next().map(|shape| {
                let (start, len) = (*next, shape.num_elements());
                *next += len;
                (**flat).clone().narrow(0, start, len).reshape(shape)
            }),
        };
        match value {
            // A new parameter, since one that is mapped from another may have lost that it is to be trained.
            Some(value) => Param::from_tensor(value),
            None => param,
        }
    }
}

/// What weights were in that a model has let go of, f32 in host memory. A pass that has just left them may have them for a moment longer.
#[derive(Debug)]
pub struct Released(FlexTensor);

impl Released {
    pub(super) fn new(flat: FlexTensor) -> Self {
        Released(flat)
    }

    /// Number of elements.
    pub fn len(&self) -> usize {
        self.0.shape().num_elements()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The memory with the values that they had, if nobody else has it.
    pub fn into_vec(self) -> Option<Vec<f32>> {
        let is_all = self.0.bytes().len() == self.len() * size_of::<f32>();
        if !(is_all && self.0.is_unique()) {
            return None;
        }
        self.0.into_data().try_into_vec().ok()
    }
}

/// Replaces tensors by ones that take no memory.
pub(super) struct Release<'a>(pub(super) &'a Device);

impl ModuleMapper for Release<'_> {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        drop(param);
        Param::from_tensor(Tensor::zeros([1; D], self.0))
    }
}

/// Replaces weights by leaves that stand for them, and keeps them in `resident`.
struct ReplaceByLeaves<'a> {
    device: &'a Device,
    resident: &'a Resident,
}

impl ModuleMapper for ReplaceByLeaves<'_> {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let leaf = fused::empty_leaf::<D>(self.device);
        self.resident.insert(fused::leaf_id(leaf.clone()), param.val());
        Param::initialized(param.id, leaf)
    }
}

/// `module` with leaves without contents instead of its weights, and the weights.
pub(super) fn detach_weights<M: Module>(module: M, device: &Device) -> (M, Arc<Resident>) {
    let resident = Arc::new(Resident::default());
    let leaves_only = module.map(&mut ReplaceByLeaves { device, resident: &resident });
    (leaves_only, resident)
}

/// Stores the weights of `module` again under the leaves of `leaves_only`.
pub(super) fn refill<M: Module>(leaves_only: &M, module: &M, resident: &Resident) {
    let mut leaves = Leaves::default();
    leaves_only.visit(&mut leaves);
    module.visit(&mut Refill { leaves: leaves.0.into_iter(), resident });
}

#[derive(Default)]
struct Leaves(Vec<NodeId>);

impl ModuleVisitor for Leaves {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        self.0.push(fused::leaf_id(param.val()));
    }
}

struct Refill<'a> {
    leaves: std::vec::IntoIter<NodeId>,
    resident: &'a Resident,
}

impl ModuleVisitor for Refill<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if let Some(leaf) = self.leaves.next() {
            self.resident.insert(leaf, param.val());
        }
    }
}
