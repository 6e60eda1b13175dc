// Style sheets are imported for their effect; esbuild gathers them into one file.
declare module "*.css";
